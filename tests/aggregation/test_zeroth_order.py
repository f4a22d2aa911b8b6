"""Zeroth order: slopes of the loss, the smoothed loss, bytes, and no derivative anywhere."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm import _noise
from jaxcomm.aggregation import zeroth_order_gradient
from jaxcomm.aggregation._zeroth_order import Directions
from tests.workers import aggregate, mesh_of

WORKERS = 4
PARAMS = {"w": jnp.linspace(-1, 1, 6).reshape(3, 2), "b": jnp.float32(0.5)}
BATCH = jnp.asarray(np.random.default_rng(2).normal(size=(WORKERS, 3)), jnp.float32)


def quadratic(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def test_of_gradients_it_is_one_projection_matrix() -> None:
    """Of rank K, from unit vectors: U'U / K for signs U has a diagonal of 1."""
    tx, units = jaxcomm.zeroth_order(3, distribution="rademacher"), jnp.eye(8)
    matrix = np.stack([aggregate(tx, unit[None])[0] for unit in units])
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-6)
    np.testing.assert_allclose(np.diag(matrix), 1, rtol=1e-6)
    assert np.linalg.matrix_rank(matrix, tol=1e-4) == 3
    values = 3 * matrix  # Sums of three signs.
    np.testing.assert_allclose(values, np.round(values), atol=1e-5)
    assert {*np.unique(np.abs(np.round(values)))} == {1, 3}


@pytest.fixture(scope="module")
def of_losses() -> Any:
    """One step of descent along 5 directions, from losses and from gradients."""
    tx = optax.chain(jaxcomm.zeroth_order(5, smoothing=0.1), optax.sgd(1.0))
    state = jaxcomm.init(tx, PARAMS, WORKERS)

    def gradients(loss_fn: Any, params: Any, batch: Any) -> Any:
        return jaxcomm.local_value_and_grad(loss_fn)(params, batch)

    with jax.numpy_rank_promotion("allow"):
        return [
            jaxcomm.simulate(quadratic, tx, WORKERS, gradients=given, donate=False)(
                PARAMS, state, BATCH
            )
            for given in (None, gradients)
        ]


def test_differences_of_a_quadratic_are_slopes(of_losses: Any) -> None:
    """Two-sided differences of a quadratic are exact, so the gradient is that of projections."""
    (found, _, _), (expected, _, _) = of_losses
    for name, x in expected.items():
        assert np.abs(x - PARAMS[name]).max() > 0.1
        np.testing.assert_allclose(found[name], x, rtol=1e-4, atol=1e-5)


def test_the_loss_of_metrics_is_the_smoothed_one(of_losses: Any) -> None:
    (_, _, smoothed), (_, _, exact) = of_losses
    assert 0 < float(smoothed["loss"] - exact["loss"]) < 0.1


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


@pytest.mark.parametrize("size", [100, 100_000])
def test_tens_of_bytes_for_any_model(size: int) -> None:
    tx = optax.chain(jaxcomm.zeroth_order(4), optax.sgd(0.1))
    mesh, params = mesh_of(8), jax.ShapeDtypeStruct((size,), jnp.float32)
    state = jax.eval_shape(lambda x: jaxcomm.init(tx, x, mesh), params)
    step = jaxcomm.make_step(lambda x, b: jnp.sum(x**2) * jnp.mean(b), tx, mesh)
    sent = jaxcomm.wire.account(step, params, state, jnp.ones(8))
    assert sent.bytes_per_worker == 2 * 7 / 8 * (4 * 4 + 4)  # Slopes, and the loss of metrics.


@jax.custom_jvp
def without_derivative(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.abs(jnp.round(4 * x)))


@without_derivative.defjvp
def _fail(primals: Any, tangents: Any) -> Any:
    raise AssertionError("differentiated")


def test_no_backward_pass_runs_and_aux_is_a_mean_over_points() -> None:
    """It descends on a staircase, whose derivative is 0, on a mesh with two devices a worker."""
    mesh = jax.make_mesh(
        (2, 2), ("data", "inner"), (jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    tx = optax.chain(
        jaxcomm.zeroth_order(16, smoothing=0.3, distribution="rademacher"), optax.sgd(0.02)
    )

    def loss(x: jax.Array, batch: jax.Array) -> Any:
        value = without_derivative(x) * jnp.mean(batch)
        return value, {"twice": 2 * value}

    params = jnp.linspace(-1, 1, 10)
    step = jaxcomm.make_step(loss, tx, mesh, has_aux=True)
    state, losses = jaxcomm.init(tx, params, mesh), []
    for _ in range(20):
        params, state, metrics = step(params, state, jnp.ones(4))
        losses.append(float(metrics["loss"]))
        np.testing.assert_allclose(metrics["twice"], 2 * metrics["loss"], rtol=1e-5)
    assert losses[-1] < 0.6 * losses[0]


def test_devices_of_a_worker_are_as_good_as_workers() -> None:
    tx = optax.chain(jaxcomm.zeroth_order(2), optax.sgd(1.0))
    found = []
    with jax.numpy_rank_promotion("allow"):
        for where in (WORKERS, {"data": 2, "inner": 2}):
            step = jaxcomm.simulate(quadratic, tx, where, donate=False)
            found.append(step(PARAMS, jaxcomm.init(tx, PARAMS, where), BATCH)[0])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), *found)


@pytest.mark.parametrize("skips", [False, True])
def test_one_workers_loss_that_is_nan_reaches_all(skips: bool) -> None:
    tx = optax.chain(jaxcomm.zeroth_order(2), optax.sgd(1.0))
    tx = jaxcomm.skip_nonfinite(tx) if skips else tx
    spoiled = BATCH.at[2, 1].set(jnp.nan)
    step = jaxcomm.simulate(lambda x, b: jnp.sum(x) * jnp.mean(b), tx, WORKERS, donate=False)
    params, state, _ = step(jnp.ones(3), jaxcomm.init(tx, jnp.ones(3), WORKERS), spoiled)
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


@pytest.mark.slow
def test_normal_numbers_are_normal() -> None:
    step, key = jnp.zeros((), jnp.uint32), jax.random.key(0, impl="threefry2x32")
    drawn = Directions(jnp.zeros(10_000), _noise.require_key(key), step, 100, "gaussian")
    sample = np.asarray(jax.jit(lambda: drawn.each(lambda u: u))(), np.float64)
    moments = [(sample**power).mean() for power in range(1, 5)]
    np.testing.assert_allclose(moments, [0, 1, 0, 3], atol=0.02)
    assert np.abs(np.corrcoef(sample) - np.eye(100)).max() < 0.06


def first_step(tx: Any, **options: Any) -> None:
    params = jnp.ones(3)
    state = jaxcomm.init(tx, params, 2)
    step = jaxcomm.simulate(lambda x, b: jnp.sum(x) * jnp.mean(b), tx, 2, **options)
    step(params, state, jnp.ones(2))


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.clip_by_global_norm(1.0), jaxcomm.zeroth_order()),
        jaxcomm.accumulate(jaxcomm.zeroth_order(), 2),
        jaxcomm.delayed(jaxcomm.zeroth_order()),
    ],
    ids=["clip", "accumulate", "delayed"],
)
def test_what_needs_gradients_is_refused(tx: Any) -> None:
    with pytest.raises(ValueError, match="`zeroth_order` evaluates the loss itself"):
        first_step(tx)


def test_other_mistakes() -> None:
    with pytest.raises(ValueError, match="gradients at once: leave out directions"):
        jaxcomm.scheduling.wait_free(jaxcomm.zeroth_order())
    state = jnp.zeros(3)
    tx = jaxcomm.zeroth_order()
    step = jaxcomm.simulate(lambda x, s, b: (jnp.sum(x), s), tx, 2, has_model_state=True)
    with pytest.raises(ValueError, match="does not support `has_model_state=True`"):
        step(state, state, jaxcomm.init(tx, state, 2), jnp.ones(2))
    own = jaxcomm.replicate(jnp.ones(3), 2)
    step = jaxcomm.simulate(lambda x, b: jnp.sum(x) * jnp.mean(b), tx, 2)
    with pytest.raises(ValueError, match="adds slopes of all workers at one point"):
        step(own, jaxcomm.init(tx, own, 2), jnp.ones(2))
