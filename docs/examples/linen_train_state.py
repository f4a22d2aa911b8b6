"""A flax.linen TrainState with checkpoints; training goes on from a checkpoint.

Run it on 8 fake devices, or without XLA_FLAGS on GPUs:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python docs/examples/linen_train_state.py

Each worker sends the signs of its gradient and keeps the error for the next step. The program saves
the state halfway, trains to the end, and repeats the second half from the checkpoint. It prints the
first and last loss and the bytes sent, for the signs and for the exact mean in float32. The errors
of all workers are part of the state, so the repeated losses are equal to the last bit.
14 lines differ from the ordinary program: those that end in `# jaxcomm`.
"""

import tempfile

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import jaxcomm  # jaxcomm
from jaxcomm.checkpoint import Checkpoints  # jaxcomm

STEPS, ROWS = 100, 128
model = nn.Sequential([nn.Dense(128), nn.gelu, nn.Dense(10)])


@jax.jit
def make_batch(number):
    """Noisy points around ten centers."""
    label_key, noise_key = jax.random.split(jax.random.key(number))
    centers = jax.random.normal(jax.random.key(42), (10, 32))
    labels = jax.random.randint(label_key, (ROWS,), 0, 10)
    return centers[labels] + jax.random.normal(noise_key, (ROWS, 32)), labels


def loss_fn(params, batch):
    x, labels = batch
    logits = model.apply({"params": params}, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train(name, aggregator, folder):  # jaxcomm
    tx = optax.chain(aggregator, optax.sgd(0.1, momentum=0.9))  # jaxcomm
    step = jaxcomm.make_step(loss_fn, tx, mesh)  # jaxcomm

    def new_state():
        params = model.init(jax.random.key(0), jnp.zeros((1, 32)))["params"]
        opt_state = jaxcomm.init(tx, params, mesh)  # jaxcomm
        return TrainState(jnp.int32(0), model.apply, params, tx, opt_state)

    def run(state, steps):
        losses = []
        while state.step < steps:
            params, opt_state, metrics = step(state.params, state.opt_state, make_batch(state.step))
            state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
            losses.append(float(metrics["loss"]))
        return state, losses

    state, first_half = run(new_state(), STEPS // 2)
    with Checkpoints(f"{folder}/{name}") as checkpoints:  # jaxcomm
        checkpoints.save(STEPS // 2, state)  # jaxcomm
        _, second_half = run(state, STEPS)
        state, repeated = run(checkpoints.restore(new_state()).state, STEPS)  # jaxcomm
    assert repeated == second_half and len(repeated) == STEPS // 2

    batch = make_batch(0)
    sent = jaxcomm.wire.account(step, state.params, state.opt_state, batch)  # jaxcomm
    print(f"{name}: {sent.bytes_per_worker:,.0f} bytes per worker and step, ", end="")  # jaxcomm
    print(f"loss {first_half[0]:.4f} to {second_half[-1]:.4f}")
    assert second_half[-1] < 0.1 * first_half[0]


mesh = jax.make_mesh((jax.device_count(),), ("data",))  # jaxcomm
with tempfile.TemporaryDirectory() as folder:
    train("ef_sign_sgd", jaxcomm.ef_sign_sgd(), folder)  # jaxcomm
    train("mean", jaxcomm.mean(), folder)  # jaxcomm
