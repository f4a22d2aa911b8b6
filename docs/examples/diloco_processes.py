"""DiLoCo over two processes: ten local steps, then one compressed outer step.

Run it with two processes on this machine, on CPU devices or on one GPU for each process:

    python -m jaxcomm.launch --processes 2 -- docs/examples/diloco_processes.py

On a cluster, start the file once for each process, as docs/clusters.md describes. It prints the
loss at the end of the first and of the last ten steps, and the average bytes sent: for DiLoCo with
outer steps of 8 bits, and for the exact mean of the gradients, in float32, in each step.
12 lines differ from the ordinary program, in which the same processes compute the mean gradient in
each step: those that end in `# jaxcomm`.
"""

import jax
import numpy as np
import optax

import jaxcomm  # jaxcomm
from jaxcomm import launch, synchronization  # jaxcomm

STEPS, PERIOD, ROWS = 300, 10, 64

launch.initialize()  # jaxcomm
mesh = jax.make_mesh((jax.device_count(),), ("data",))
by_worker = jax.NamedSharding(mesh, jax.P("data"))


def make_params():
    """The same in all processes."""
    keys = jax.random.split(jax.random.key(0))
    hidden = jax.random.normal(keys[0], (32, 128)) / 32**0.5
    return {"hidden": hidden, "out": jax.random.normal(keys[1], (128, 10)) / 128**0.5}


def make_batches():
    """Noisy points around ten centers: other points in each process."""
    centers = np.random.default_rng(42).normal(size=(10, 32))
    random = np.random.default_rng(jax.process_index())
    for _ in range(STEPS):
        labels = random.integers(10, size=ROWS, dtype=np.int32)
        yield np.float32(centers[labels] + random.normal(size=(ROWS, 32))), labels


def loss_fn(params, batch):
    x, labels = batch
    logits = jax.nn.gelu(x @ params["hidden"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train(name, tx, params):  # jaxcomm
    opt_state = jaxcomm.init(tx, params, mesh)  # jaxcomm
    step = jaxcomm.make_step(loss_fn, tx, mesh, metrics=PERIOD)  # jaxcomm
    losses = []
    for number, batch in enumerate(make_batches(), 1):
        batch = jax.make_array_from_process_local_data(by_worker, batch)
        params, opt_state, metrics = step(params, opt_state, batch)
        if number % PERIOD == 0:
            losses.append(float(metrics["loss"]))
    account = jaxcomm.wire.account(step, params, opt_state, batch)  # jaxcomm
    sent = account.amortized_bytes_per_worker(1 / PERIOD)  # jaxcomm
    if jax.process_index() == 0:
        print(f"{name}: {sent:,.0f} bytes per worker and step, ", end="")  # jaxcomm
        print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
    assert losses[-1] < 0.1 * losses[0]


inner, outer = optax.adamw(1e-3), optax.sgd(0.7, momentum=0.9, nesterov=True)
tx = synchronization.diloco(inner, outer, PERIOD, aggregator=jaxcomm.global_qsgd(bits=8))  # jaxcomm
train("diloco", tx, jaxcomm.replicate(make_params(), mesh))  # jaxcomm
train("mean", optax.chain(jaxcomm.mean(), inner), make_params())  # jaxcomm
