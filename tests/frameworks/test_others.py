"""Models of equinox and haiku: parameters without what is no array, and model state."""

from typing import Any

import chex
import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from tests.frameworks.test_flax import MESH, METHOD, METHODS, X, Y


@pytest.mark.slow
@METHOD
def test_equinox(method: str) -> None:
    model = eqx.nn.MLP(6, 1, 8, 1, key=jax.random.key(0))
    params, rest = eqx.partition(model, eqx.is_inexact_array)
    tx = METHODS[method](0.05)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        model = eqx.combine(params, rest)
        return jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)

    step = jaxcomm.make_step(loss_fn, tx, MESH)
    opt_state = jaxcomm.init(tx, params, MESH)
    losses = []
    for _ in range(60):
        params, opt_state, metrics = step(params, opt_state, (X, Y))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.1 * losses[0]
    prediction = jax.vmap(eqx.combine(params, rest))(X)
    np.testing.assert_allclose(np.mean((prediction - Y) ** 2), losses[-1], rtol=0.5)


@pytest.mark.slow
def test_equinox_with_model_state() -> None:
    keys = jax.random.split(jax.random.key(0))
    layers = [eqx.nn.Linear(6, 8, key=keys[0]), eqx.nn.Linear(8, 1, key=keys[1])]
    params, rest = eqx.partition(layers, eqx.is_inexact_array)
    tx = METHODS["feedback"](0.05)

    def loss_fn(params: Any, state: Any, batch: Any) -> Any:
        first, last = eqx.combine(params, rest)
        hidden = jax.vmap(first)(batch[0])
        mean, variance = jnp.mean(hidden, 0, keepdims=True), jnp.var(hidden, 0, keepdims=True)
        state = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state, (mean, variance))
        hidden = (hidden - mean) / jnp.sqrt(variance + 1e-5)
        return jnp.mean((jax.vmap(last)(jax.nn.relu(hidden)) - batch[1]) ** 2), state

    step = jaxcomm.make_step(loss_fn, tx, MESH, has_model_state=True)
    opt_state, state = jaxcomm.init(tx, params, MESH), (jnp.zeros((1, 8)), jnp.ones((1, 8)))
    losses = []
    for _ in range(60):
        params, state, opt_state, metrics = step(params, state, opt_state, (X, Y))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("kind", ["mesh", "simulated"])
def test_batch_norm_of_equinox_reduces_over_an_axis_of_vmap(kind: str) -> None:
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(6, "batch", mode="batch")
    params, rest = eqx.partition(norm, eqx.is_inexact_array)
    tx = optax.chain(jaxcomm.mean(), optax.sgd(1.0))

    def loss_fn(params: Any, state: Any, x: jax.Array) -> Any:
        norm = jax.vmap(eqx.combine(params, rest), (0, None), (0, None), axis_name="batch")
        out, state = norm(x, state)
        return jnp.mean((out - x) ** 2), state

    workers: Any = MESH if kind == "mesh" else 4
    make: Any = jaxcomm.make_step if kind == "mesh" else jaxcomm.simulate
    step = make(loss_fn, tx, workers, has_model_state=True, donate=False)
    new, after, _, _ = step(params, state, jaxcomm.init(tx, params, workers), X)
    each = [
        jax.grad(loss_fn, has_aux=True)(params, state, rows) for rows in np.split(np.asarray(X), 4)
    ]
    gradient = jax.tree.map(lambda *leaves: sum(leaves) / 4, *[gradient for gradient, _ in each])
    expected = jax.tree.map(lambda x, g: x - g, params, gradient)
    chex.assert_trees_all_close(new, expected, rtol=1e-5, atol=1e-6)
    means = jax.tree.map(lambda *x: sum(map(np.float64, x)) / 4, *[state for _, state in each])
    chex.assert_trees_all_close(after, means, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@METHOD
def test_haiku(method: str) -> None:
    def forward(x: jax.Array) -> jax.Array:
        hidden = hk.BatchNorm(True, True, decay_rate=0.9)(hk.Linear(8)(x), is_training=True)
        return hk.Linear(1)(jax.nn.relu(hidden))

    model = hk.transform_with_state(forward)
    params, state = model.init(jax.random.key(0), X)
    tx = METHODS[method](0.05)

    def loss_fn(params: Any, state: Any, batch: Any, key: jax.Array) -> Any:
        prediction, state = model.apply(params, state, key, batch[0])
        return jnp.mean((prediction - batch[1]) ** 2), state

    step = jaxcomm.make_step(loss_fn, tx, MESH, has_model_state=True)
    opt_state = jaxcomm.init(tx, params, MESH)
    losses = []
    with jax.numpy_dtype_promotion("standard"):  # Haiku's moving average multiplies dtypes.
        for number in range(60):
            params, state, opt_state, metrics = step(
                params, state, opt_state, (X, Y), key=jax.random.key(number)
            )
            losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.3 * losses[0]
