"""Zeroth order: slopes of the loss, the smoothed loss, bytes, and no derivative anywhere."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm import zeroth_order
from jaxcomm.aggregation import zeroth_order_gradient
from tests.aggregation.runs import prepared, refuse
from tests.workers import aggregate, mesh_of

WORKERS = 4
PARAMS = {"w": jnp.linspace(-1, 1, 6).reshape(3, 2), "b": jnp.float32(0.5)}
BATCH = jnp.asarray(np.random.default_rng(2).normal(size=(WORKERS, 3)), jnp.float32)


def quadratic(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def test_estimates_are_projections_of_gradients() -> None:
    """Of rank K, from unit vectors: U'U / K for signs U has a diagonal of 1."""
    tx, units = zeroth_order(3, distribution="rademacher"), jnp.eye(8)
    matrix = np.stack([aggregate(tx, unit[None])[0] for unit in units])
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-6)
    np.testing.assert_allclose(np.diag(matrix), 1, rtol=1e-6)
    assert np.linalg.matrix_rank(matrix, tol=1e-4) == 3
    values = 3 * matrix  # Sums of three signs.
    np.testing.assert_allclose(values, np.round(values), atol=1e-5)
    assert {*np.unique(np.abs(np.round(values)))} == {1, 3}


def test_differences_of_a_quadratic_are_slopes() -> None:
    """Two-sided differences of a quadratic are exact, so the gradient is that of projections.

    The loss of metrics is the smoothed one.
    """
    tx = optax.chain(zeroth_order(5, smoothing=0.1), optax.sgd(1.0))
    of_gradients = lambda loss, *args: jaxcomm.local_value_and_grad(loss)(*args)  # noqa: E731
    found = []
    with jax.numpy_rank_promotion("allow"):
        for gradients in (None, of_gradients):
            step, state = prepared(quadratic, tx, PARAMS, WORKERS, gradients=gradients)
            found.append(step(PARAMS, state, BATCH)[::2])
    (params, smoothed), (expected, exact) = found
    for name, x in expected.items():
        assert np.abs(x - PARAMS[name]).max() > 0.1
        np.testing.assert_allclose(params[name], x, rtol=1e-4, atol=1e-5)
    assert 0 < float(smoothed["loss"] - exact["loss"]) < 0.1


@pytest.mark.slow
def test_unbiased_for_the_smoothed_loss() -> None:
    """E cos(x + u) = exp(-1/2) cos(x): the gradient of the loss itself is 1.6 times as large."""
    x, draws = jnp.asarray([0.3, 1.0, 2.0], jnp.float32), 20_000

    def drawn(key: jax.Array) -> jax.Array:
        return zeroth_order_gradient(
            lambda x: jnp.sum(jnp.cos(x)), x, key=key, directions=8, smoothing=1.0
        )[1]

    keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), draws)
    many = jax.vmap(lambda _: jax.lax.map(drawn, keys, batch_size=1000), axis_name="data")
    sample = np.asarray(jax.jit(many)(jnp.zeros(1))[0], np.float64)
    smoothed = -np.exp(-0.5) * np.sin(np.asarray(x, np.float64))
    deviation = sample.std(axis=0) / draws**0.5
    assert np.all(deviation < 0.05 * np.abs(smoothed))
    assert np.all(np.abs(sample.mean(axis=0) - smoothed) < 5.5 * deviation)


@jax.custom_jvp
def without_derivative(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.abs(jnp.round(4 * x)))


@without_derivative.defjvp
def _fail(primals: Any, tangents: Any) -> Any:
    raise AssertionError("differentiated")


def test_no_backward_pass_runs_and_aux_is_a_mean_over_points() -> None:
    """It descends on a staircase, whose derivative is 0, on a mesh with two devices a worker."""
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "inner"), kinds, devices=jax.devices()[:4])
    tx = zeroth_order(16, smoothing=0.3, distribution="rademacher")
    tx = optax.chain(tx, optax.sgd(0.02))

    def loss(x: jax.Array, batch: jax.Array) -> Any:
        value = without_derivative(x) * jnp.mean(batch)
        return value, {"twice": 2 * value}

    params, losses = jnp.linspace(-1, 1, 10), []
    step, state = prepared(loss, tx, params, mesh, has_aux=True)
    for _ in range(20):
        params, state, metrics = step(params, state, jnp.ones(4))
        losses.append(float(metrics["loss"]))
        np.testing.assert_allclose(metrics["twice"], 2 * metrics["loss"], rtol=1e-5)
    assert losses[-1] < 0.6 * losses[0]


def test_devices_of_a_worker_equal_workers() -> None:
    tx = optax.chain(zeroth_order(2), optax.sgd(1.0))
    found = []
    with jax.numpy_rank_promotion("allow"):
        for where in (WORKERS, {"data": 2, "inner": 2}):
            step, state = prepared(quadratic, tx, PARAMS, where)
            found.append(step(PARAMS, state, BATCH)[0])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), *found)


def total(x: jax.Array, batch: jax.Array) -> jax.Array:
    return jnp.sum(x) * jnp.mean(batch)


@pytest.mark.parametrize("skips", [False, True])
def test_one_workers_loss_that_is_nan_reaches_all(skips: bool) -> None:
    tx = optax.chain(zeroth_order(2), optax.sgd(1.0))
    tx = jaxcomm.skip_nonfinite(tx) if skips else tx
    step, state = prepared(total, tx, jnp.ones(3), WORKERS)
    params, state, _ = step(jnp.ones(3), state, BATCH.at[2, 1].set(jnp.nan))
    np.testing.assert_array_equal(params, [1] * 3 if skips else [np.nan] * 3)
    assert not skips or state.skipped_steps == 1


def test_by_hand_in_shard_map() -> None:
    """With signs, the slope of a parabola of one coordinate is its gradient, the mean over all."""

    def gradient(x: jax.Array, batch: jax.Array) -> Any:
        key = jax.random.key(4, impl="threefry2x32")
        loss, found = zeroth_order_gradient(
            lambda x, b: jnp.mean((x - b) ** 2), x, batch, key=key, distribution="rademacher"
        )
        return loss[None], found

    on_mesh = jax.shard_map(
        gradient, mesh=mesh_of(4), in_specs=(P(), P("data")), out_specs=(P("data"), P())
    )
    losses, found = jax.jit(on_mesh)(jnp.float32(3), jnp.arange(4.0))
    np.testing.assert_allclose(found, 2 * (3 - 1.5), rtol=1e-3)
    np.testing.assert_allclose(losses, [9, 4, 1, 0], atol=1e-4)


@pytest.mark.slow
def test_directions_are_not_stored() -> None:
    """Temporaries of 64 directions are those of a few."""
    params, key = jnp.zeros(2**18), jax.random.key(0, impl="threefry2x32")

    def gradient(x: jax.Array) -> jax.Array:
        loss = lambda x: jnp.sum(x**2)  # noqa: E731
        return zeroth_order_gradient(loss, x, key=key, directions=64)[1]

    mapped = jax.vmap(gradient, in_axes=None, axis_name="data", axis_size=1, out_axes=None)
    memory = jax.jit(mapped).lower(params).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 4 * params.nbytes


ZEROTH = zeroth_order()


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.clip_by_global_norm(1.0), ZEROTH),
        jaxcomm.accumulate(ZEROTH, 2),
        jaxcomm.delayed(ZEROTH),
    ],
    ids=["clip", "accumulate", "delayed"],
)
def test_methods_that_need_gradients_are_refused(tx: Any) -> None:
    def first() -> Any:
        step, state = prepared(total, tx, jnp.ones(3), 2)
        return step(jnp.ones(3), state, jnp.ones(2))

    refuse("`zeroth_order` evaluates the loss itself", first)


def test_losses_without_a_single_point_are_refused() -> None:
    wait_free = jaxcomm.scheduling.wait_free
    refuse("gradients at once: leave out directions", lambda: wait_free(ZEROTH))
    own = jaxcomm.replicate(jnp.ones(3), 2)
    step, state = prepared(total, ZEROTH, own, 2)
    message = "adds slopes of all workers at one point"
    refuse(message, lambda: step(own, state, jnp.ones(2)))
