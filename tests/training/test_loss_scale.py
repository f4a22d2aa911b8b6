"""Loss scaling: the gradient is that of the loss, and one worker's overflow counts for all."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm.training import loss_scaled, loss_scaled_gradients
from tests.slow import slow
from tests.training.places import at, begun

X = np.random.default_rng(0).normal(size=(16, 5)).astype(np.float16)
PARAMS = {"w": jnp.linspace(-1, 1, 5)}
PLACES = pytest.mark.parametrize("where", ["auto 4", "simulated 4"])


def scaled(loss: Any, where: str, params: Any, axis_name: Any = "data", **options: Any) -> Any:
    """The step, and the state of the optimizer."""
    inner = optax.chain(jaxcomm.mean(axis_name), optax.sgd(1.0))
    gradients = functools.partial(loss_scaled_gradients, **options)
    given: Any = {"has_model_state": True, "has_aux": options.get("has_aux", False)}
    tx = jaxcomm.skip_nonfinite(inner)
    return begun(loss, tx, at(where), params, axis_name=axis_name, gradients=gradients, **given)


def of_half(factor: float) -> Any:
    """A loss in float16, and how often it was called."""

    def loss(params: Any, count: jax.Array, rows: jax.Array) -> Any:
        value = jnp.mean(jnp.abs(rows @ params["w"].astype(jnp.float16))) * jnp.float16(factor)
        return value, (count + 1, {"rows": jnp.float32(len(rows))})

    return loss


@PLACES
def test_small_gradients_survive(where: str) -> None:
    step, opt_state = scaled(of_half(1e-5), where, PARAMS, has_aux=True)
    after, state, _, metrics = step(PARAMS, loss_scaled(jnp.int32(0)), opt_state, X)
    w = np.linspace(-1, 1, 5)
    np.testing.assert_allclose(metrics["loss"], 1e-5 * np.mean(np.abs(X @ w)), rtol=0.02)
    exact = 1e-5 * np.mean(np.sign(X @ w)[:, None] * X.astype(np.float64), axis=0)
    moved = np.float64(PARAMS["w"]) - np.float64(after["w"])
    np.testing.assert_allclose(moved, exact, rtol=0.01, atol=3e-8)  # Of float32 parameters near 1.
    assert state.model_state == 1 and state.finite_steps == 1


@PLACES
def test_one_workers_overflow_halves_the_scale_of_all(where: str) -> None:
    step, opt_state = scaled(of_half(1.0), where, PARAMS, growth_interval=2, has_aux=True)
    params, state, scales = PARAMS, loss_scaled(jnp.int32(0), scale=2.0**10), []
    large = X.copy()
    large[-1] = 60000  # On the last worker only.
    for rows in (X, X, X, large, X):
        before = params
        params, state, opt_state, metrics = step(params, state, opt_state, rows)
        scales.append(float(state.scale))
        if rows is large:
            chex.assert_trees_all_equal(params, before)
    assert scales == [2.0**10, 2.0**11, 2.0**11, 2.0**10, 2.0**10]
    assert metrics["rows"] == 4 and state.model_state == 5


@pytest.mark.parametrize("where", ["auto 4", slow("simulated 4")])
def test_parameters_in_float16(where: str) -> None:
    """Gradients are divided by the scale in float32, where 2**24 is not infinite."""
    params = jnp.zeros(5, jnp.float16)
    slope = jnp.arange(1.0, 6) * 2.0**-10

    def loss(w: Any, state: Any, rows: Any) -> Any:
        return jnp.mean(rows) * jnp.sum(w.astype(jnp.float32) * slope), state

    step, opt_state = scaled(loss, where, params)
    for exponent in (0, 15, 16, 24):
        state = loss_scaled(scale=2.0**exponent)
        after, state, _, _ = step(params, state, opt_state, jnp.ones(4))
        if exponent < 24:
            np.testing.assert_array_equal(after, -slope.astype(jnp.float16))
            assert state.scale == 2.0**exponent
        else:
            np.testing.assert_array_equal(after, params)
            assert state.scale == 2.0**23  # 5 * 2^14 overflows.


@pytest.mark.parametrize("before, value, after", [(24, 1.0, 24), (0, np.inf, 0), (3, np.inf, 2)])
def test_the_scale_stays_in_its_range(before: int, value: float, after: int) -> None:
    loss = lambda w, s, b: (w[0] + jnp.mean(w[1] * b), s)  # noqa: E731
    params = jnp.zeros(2)
    step, opt_state = scaled(loss, "simulated 2", params, growth_interval=1)
    state = step(params, loss_scaled(scale=2.0**before), opt_state, jnp.full(2, value))[1]
    assert state.scale == 2.0**after and state.finite_steps == 0


@pytest.mark.parametrize("where", ["auto 2x2", "simulated 2x2"])
def test_all_axes_of_the_mesh(where: str) -> None:
    loss = lambda w, s, b: (jnp.mean(b.astype(jnp.float32) @ w), s)  # noqa: E731
    rows, params = np.where(np.arange(4)[:, None] == 3, np.float16(np.inf), X[:4]), jnp.ones(5)
    axes = ("data", "inner")
    step, opt_state = scaled(loss, where, params, axes)
    with pytest.raises(ValueError, match=r"must name all axes of the mesh, but lacks \['inner'\]"):
        step(params, loss_scaled(), opt_state, rows)
    step, opt_state = begun(
        loss,
        optax.chain(jaxcomm.mean(), optax.sgd(1.0)),
        at(where),
        params,
        has_model_state=True,
        gradients=functools.partial(loss_scaled_gradients, axis_name=axes),
    )
    assert step(params, loss_scaled(), opt_state, rows)[1].scale == 2.0**14


@pytest.mark.parametrize("scale", [3, 0.5, 2.0**25])
def test_a_scale_out_of_range(scale: float) -> None:
    with pytest.raises(ValueError, match=r"`scale` must be a power of two from 1 to 2\*\*24"):
        loss_scaled(scale=scale)
