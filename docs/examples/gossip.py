"""CHOCO-SGD on a ring: each worker sends compressed differences to two neighbors only.

Run it on 8 fake devices, or without XLA_FLAGS on GPUs:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python docs/examples/gossip.py

Install `.[gossip]` first, for the graph. The program prints the first and last loss and the bytes
sent, for CHOCO-SGD with top-k and for the exact mean of the gradients in float32. With CHOCO-SGD,
the parameters differ by worker. The program prints their squared distance from their mean, and the
loss at this mean. `gossip.dpsgd(ring)` would send whole parameters.
15 lines differ from the ordinary program: those that end in `# jaxcomm`.
"""

import jax
import optax

import jaxcomm  # jaxcomm
from jaxcomm import gossip  # jaxcomm

STEPS, ROWS = 200, 256


def make_params():
    keys = jax.random.split(jax.random.key(0))
    hidden = jax.random.normal(keys[0], (32, 128)) / 32**0.5
    return {"hidden": hidden, "out": jax.random.normal(keys[1], (128, 10)) / 128**0.5}


@jax.jit
def make_batch(key):
    """Noisy points around ten centers."""
    label_key, noise_key = jax.random.split(key)
    centers = jax.random.normal(jax.random.key(42), (10, 32))
    labels = jax.random.randint(label_key, (ROWS,), 0, 10)
    return centers[labels] + jax.random.normal(noise_key, (ROWS, 32)), labels


def loss_fn(params, batch):
    x, labels = batch
    logits = jax.nn.gelu(x @ params["hidden"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train(name, tx, params):  # jaxcomm
    opt_state = jaxcomm.init(tx, params, mesh)  # jaxcomm
    step = jaxcomm.make_step(loss_fn, tx, mesh)  # jaxcomm
    losses = []
    for key in jax.random.split(jax.random.key(0), STEPS):
        batch = make_batch(key)
        params, opt_state, metrics = step(params, opt_state, batch)
        losses.append(float(metrics["loss"]))
    sent = jaxcomm.wire.account(step, params, opt_state, batch)  # jaxcomm
    print(f"{name}: {sent.bytes_per_worker:,.0f} bytes per worker and step, ", end="")  # jaxcomm
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
    assert losses[-1] < 0.1 * losses[0]
    return params


mesh = jax.make_mesh((jax.device_count(),), ("data",))  # jaxcomm
ring, codec = gossip.ring(mesh.size), jaxcomm.sparsifiers.top_k(ratio=0.05)  # jaxcomm
choco = gossip.choco_sgd(ring, codec, step_size=0.2)  # jaxcomm
sgd = optax.sgd(0.1)
train("mean", optax.chain(jaxcomm.mean(), sgd), make_params())  # jaxcomm
params = jaxcomm.replicate(make_params(), mesh)  # jaxcomm
params = train("choco_sgd", optax.chain(sgd, choco), params)  # jaxcomm
print(f"squared distance {jaxcomm.consensus_distance(params):.4f}, ", end="")  # jaxcomm
loss = loss_fn(jaxcomm.consensus(params), make_batch(jax.random.key(1)))  # jaxcomm
print(f"loss of the mean of the parameters on new data {loss:.4f}")
