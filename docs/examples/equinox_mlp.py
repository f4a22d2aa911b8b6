"""An equinox MLP; each worker sends 2 percent of its gradient and keeps the rest for later steps.

Run it on 8 fake devices, or without XLA_FLAGS on GPUs:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python docs/examples/equinox_mlp.py

It prints the first and last loss and the bytes sent: for top-k with error feedback, and for the
exact mean in float32. The residuals of error feedback are part of `opt_state`.
10 lines differ from the ordinary program: those that end in `# jaxcomm`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import jaxcomm  # jaxcomm

STEPS, ROWS = 300, 256


def make_model():
    model = eqx.nn.MLP(4, 1, width_size=64, depth=2, activation=jax.nn.gelu, key=jax.random.key(0))
    return eqx.partition(model, eqx.is_inexact_array)


_, static = make_model()  # All that is not trained: the activation, the sizes.


@jax.jit
def make_batch(key):
    x = jax.random.uniform(key, (ROWS, 4), minval=-1, maxval=1)
    return x, jnp.sin(3 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]


def loss_fn(params, batch):
    model = eqx.combine(params, static)
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def train(name, aggregator):  # jaxcomm
    params, _ = make_model()
    tx = optax.chain(aggregator, optax.sgd(0.05, momentum=0.9))  # jaxcomm
    opt_state = jaxcomm.init(tx, params, mesh)  # jaxcomm
    step = jaxcomm.make_step(loss_fn, tx, mesh)  # jaxcomm
    losses = []
    for key in jax.random.split(jax.random.key(0), STEPS):
        batch = make_batch(key)
        params, opt_state, metrics = step(params, opt_state, batch)
        losses.append(float(metrics["loss"]))
    sent = jaxcomm.wire.account(step, params, opt_state, batch)  # jaxcomm
    print(f"{name}: {sent.bytes_per_worker:,.0f} bytes per worker and step, ", end="")  # jaxcomm

    on_new_data = loss_fn(params, make_batch(jax.random.key(1)))
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}, on new data {on_new_data:.4f}")
    assert losses[-1] < 0.02 * losses[0]


mesh = jax.make_mesh((jax.device_count(),), ("data",))  # jaxcomm
train("top_k", jaxcomm.top_k_sgd(ratio=0.02))  # jaxcomm
train("mean", jaxcomm.mean())  # jaxcomm
