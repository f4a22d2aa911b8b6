"""Loss scaling: the gradient is that of the loss, and one worker's overflow counts for all."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxcomm
from jaxcomm.training import loss_scaled, loss_scaled_gradients
from tests.workers import mesh_of

N = 4
KINDS = pytest.mark.parametrize("kind", ["mesh", "simulated"])
X = np.random.default_rng(0).normal(size=(16, 5)).astype(np.float16)


def build(kind: str, **options: Any) -> tuple[Any, Any, Any]:
    """The step, its parameters and the state of the optimizer."""
    workers: Any = mesh_of(N) if kind == "mesh" else N
    make: Any = jaxcomm.make_step if kind == "mesh" else jaxcomm.simulate
    tx = jaxcomm.skip_nonfinite(optax.chain(jaxcomm.mean(), optax.sgd(1.0)))
    has_aux, factor = options.pop("has_aux", False), options.pop("factor", 1e-5)

    def loss(params: Any, count: jax.Array, rows: jax.Array) -> Any:
        half = params["w"].astype(jnp.float16)
        value = jnp.mean(jnp.abs(rows @ half)) * jnp.float16(factor)
        return value, (count + 1, {"rows": jnp.float32(len(rows))}) if has_aux else count + 1

    gradients = functools.partial(loss_scaled_gradients, has_aux=has_aux, **options)
    step = make(
        loss, tx, workers, has_model_state=True, has_aux=has_aux, gradients=gradients, donate=False
    )
    params = {"w": jnp.linspace(-1, 1, 5)}
    return step, params, jaxcomm.init(tx, params, workers)


@KINDS
def test_small_gradients_survive(kind: str) -> None:
    step, params, opt_state = build(kind)
    after, state, _, metrics = step(params, loss_scaled(jnp.int32(0)), opt_state, X)
    w = np.linspace(-1, 1, 5)
    np.testing.assert_allclose(metrics["loss"], 1e-5 * np.mean(np.abs(X @ w)), rtol=0.02)
    exact = 1e-5 * np.mean(np.sign(X @ w)[:, None] * X.astype(np.float64), axis=0)
    moved = np.float64(params["w"]) - np.float64(after["w"])
    np.testing.assert_allclose(moved, exact, rtol=0.01, atol=3e-8)  # Of float32 parameters near 1.
    assert state.model_state == 1 and state.finite_steps == 1


@KINDS
def test_one_workers_overflow_halves_the_scale_of_all(kind: str) -> None:
    step, params, opt_state = build(kind, growth_interval=2, has_aux=True, factor=1.0)
    state, scales = loss_scaled(jnp.int32(0), scale=2.0**10), []
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


@pytest.mark.quick(1)
@KINDS
@pytest.mark.parametrize("exponent", [0, 15, 16, 24])
def test_parameters_in_float16(kind: str, exponent: int) -> None:
    workers: Any = mesh_of(N) if kind == "mesh" else N
    make: Any = jaxcomm.make_step if kind == "mesh" else jaxcomm.simulate
    tx, params = optax.chain(jaxcomm.mean(), optax.sgd(1.0)), jnp.zeros(5, jnp.float16)
    slope = jnp.arange(1.0, 6) * 2.0**-10

    def loss(w: jax.Array, state: Any, rows: jax.Array) -> Any:
        return jnp.mean(rows) * jnp.sum(w.astype(jnp.float32) * slope), state

    step = make(
        loss, tx, workers, has_model_state=True, gradients=loss_scaled_gradients, donate=False
    )
    rows, state = jnp.ones(N), loss_scaled(scale=2.0**exponent)
    after, state, _, _ = step(params, state, jaxcomm.init(tx, params, workers), rows)
    if exponent < 24:
        np.testing.assert_array_equal(after, -slope.astype(jnp.float16))
        assert state.scale == 2.0**exponent
    else:
        assert np.isinf(after[4]) and state.scale == 2.0**23  # 5 * 2^14 overflows.


@pytest.mark.parametrize("before, value, after", [(24, 1.0, 24), (0, np.inf, 0), (3, np.inf, 2)])
def test_the_scale_stays_in_its_range(before: int, value: float, after: int) -> None:
    gradients = functools.partial(loss_scaled_gradients, growth_interval=1)
    step = jaxcomm.simulate(
        lambda p, s, b: (p["a"] + jnp.mean(p["b"] * b), s),
        jaxcomm.mean(),
        2,
        has_model_state=True,
        gradients=gradients,
    )
    params = {"a": jnp.float32(0), "b": jnp.float32(0)}
    opt_state = jaxcomm.init(jaxcomm.mean(), params, 2)
    state = step(params, loss_scaled(scale=2.0**before), opt_state, jnp.full(2, value))[1]
    assert state.scale == 2.0**after and state.finite_steps == 0


@KINDS
def test_all_axes_of_the_mesh(kind: str) -> None:
    types = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=types)
    workers: Any = mesh if kind == "mesh" else {"data": 2, "model": 2}
    make: Any = jaxcomm.make_step if kind == "mesh" else jaxcomm.simulate
    tx, params = optax.chain(jaxcomm.mean(), optax.sgd(1.0)), jnp.ones(5)

    def run(**options: Any) -> Any:
        gradients = functools.partial(loss_scaled_gradients, **options)
        loss = lambda w, s, b: (jnp.mean(b.astype(jnp.float32) @ w), s)  # noqa: E731
        step = make(loss, tx, workers, has_model_state=True, gradients=gradients, donate=False)
        rows = np.where(np.arange(4)[:, None] == 3, np.float16(np.inf), X[:4])
        return step(params, loss_scaled(), jaxcomm.init(tx, params, workers), rows)[1]

    assert run(axis_name=("data", "model")).scale == 2.0**14
    with pytest.raises(ValueError, match=r"must name all axes of the mesh, but lacks \['model'\]"):
        run()


def test_mistakes() -> None:
    for scale in (3, 0, -1, 0.5, 2.0**25, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"`scale` must be a power of two from 1 to 2\*\*24"):
            loss_scaled(scale=scale)
