"""A flax nnx CNN with BatchNorm and dropout, trained with gradients of 8 bits.

Run it on 8 fake devices, or without XLA_FLAGS on GPUs:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python docs/examples/nnx_cnn.py

It prints the first and last loss, the bytes sent, and the accuracy on new images with the running
statistics of BatchNorm: for `global_qsgd`, and for the exact mean in float32.
10 lines differ from the ordinary program: those that end in `# jaxcomm`.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxcomm  # jaxcomm

STEPS, ROWS = 60, 128


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2)
        self.dense = nnx.Linear(4 * 4 * 16, 10, rngs=rngs)

    def __call__(self, images, rngs=None):
        x = nnx.relu(self.norm(self.conv(images)))
        x = nnx.avg_pool(x, (2, 2), (2, 2)).reshape(len(images), -1)
        return self.dense(self.dropout(x, rngs=rngs))


graph = nnx.graphdef(CNN(nnx.Rngs(0)))


@jax.jit
def make_batch(key):
    """Noisy images of ten patterns."""
    label_key, noise_key = jax.random.split(key)
    patterns = jax.random.normal(jax.random.key(42), (10, 8, 8, 1))
    labels = jax.random.randint(label_key, (ROWS,), 0, 10)
    return patterns[labels] + jax.random.normal(noise_key, (ROWS, 8, 8, 1)), labels


def loss_fn(params, stats, batch, key):
    images, labels = batch
    model = nnx.merge(graph, params, stats)
    logits = model(images, rngs=nnx.Rngs(dropout=key))
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, nnx.state(model, nnx.BatchStat)


def train(name, aggregator):  # jaxcomm
    _, params, stats = nnx.split(CNN(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)
    tx = optax.chain(aggregator, optax.adam(3e-3))  # jaxcomm
    opt_state = jaxcomm.init(tx, params, mesh)  # jaxcomm
    step = jaxcomm.make_step(loss_fn, tx, mesh, has_model_state=True)  # jaxcomm
    losses = []
    for key in jax.random.split(jax.random.key(0), STEPS):  # Each worker derives its own key.
        batch = make_batch(key)
        params, stats, opt_state, metrics = step(params, stats, opt_state, batch, key=key)
        losses.append(float(metrics["loss"]))
    sent = jaxcomm.wire.account(step, params, stats, opt_state, batch, key=key)  # jaxcomm
    print(f"{name}: {sent.bytes_per_worker:,.0f} bytes per worker and step, ", end="")  # jaxcomm

    model = nnx.merge(graph, params, stats)
    model.eval()
    images, labels = make_batch(jax.random.key(1))
    accuracy = jnp.mean(model(images).argmax(axis=1) == labels)
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}, accuracy {accuracy:.3f}")
    assert losses[-1] < 0.1 * losses[0]


mesh = jax.make_mesh((jax.device_count(),), ("data",))  # jaxcomm
train("global_qsgd", jaxcomm.global_qsgd(bits=8))  # jaxcomm
train("mean", jaxcomm.mean())  # jaxcomm
