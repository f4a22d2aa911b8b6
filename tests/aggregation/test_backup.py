"""The mean over the workers that finish first, around any aggregator that takes weights."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import jaxcomm
from jaxcomm.compression import blockwise
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import top_k
from jaxcomm.synchronization import shifted_exponential
from tests.cases import WEIGHTED, Case
from tests.slow import slow
from tests.workers import aggregator, draws, flat, gradients, initial, mesh_of

TIMES = shifted_exponential(1.0).sample
WORKERS, BACKUPS = 6, 2
FIRST = WORKERS - BACKUPS


def spared(tx: Any = None, backups: int = BACKUPS, **options: Any) -> Any:
    return jaxcomm.backup(tx or jaxcomm.mean(), backups, **options)


def first_of(times: np.ndarray, count: int = FIRST) -> np.ndarray:
    """Which workers count, bool[..., workers], in NumPy."""
    places = np.argsort(np.argsort(times, axis=-1, kind="stable"), axis=-1)
    return places < count


def drawn(steps: int, seed: int = 0) -> np.ndarray:
    """The times that a clock with this seed draws, [steps, workers]."""
    key = jax.random.key(seed, impl="threefry2x32")
    draw = jax.vmap(lambda step: TIMES(key, step, (WORKERS, 1))[:, 0])
    return np.asarray(draw(jnp.arange(steps, dtype=jnp.uint32)))


def test_each_step_is_the_mean_over_the_first() -> None:
    """As drawn from the seed, by whomever; and over time neither biased nor of another variance."""
    updates, steps = gradients(WORKERS), 4000
    found, rows = draws(spared(times=TIMES), updates, steps), flat(updates)
    counts = first_of(drawn(steps))
    np.testing.assert_allclose(found, counts @ rows / FIRST, rtol=0, atol=1e-6)
    # Sampling without replacement has these moments.
    variance = rows.var(axis=0, ddof=1) * (1 / FIRST - 1 / WORKERS)
    off = np.abs(found.mean(axis=0) - rows.mean(axis=0))
    assert np.all(off <= 5 * (variance / steps) ** 0.5)
    np.testing.assert_allclose(found.var(axis=0), variance, rtol=0.15)


@functools.cache
def measured(mode: str, whole: bool) -> Any:
    """One step for times of a worker, or for those of all of them."""
    tx = spared()

    def one(x: jax.Array, own: jax.Array, of_all: jax.Array) -> jax.Array:
        result: jax.Array = tx.update(x, tx.init(x), finish_times=of_all if whole else own)[0]
        return result

    if mode == "vmap":
        return jax.jit(jax.vmap(one, in_axes=(0, 0, None), axis_name="data"))
    data = PartitionSpec("data")
    return jax.jit(
        jax.shard_map(
            lambda x, own, of_all: one(x[0], own[0], of_all),
            mesh=mesh_of(WORKERS),
            in_specs=(data, data, PartitionSpec()),
            out_specs=PartitionSpec(),
        )
    )


TIED, LATE = [3.0, 1.0, 1.0, 2.0, 1.0, 1.0], [1.0, np.nan, np.inf, 0.0, np.inf, np.nan]
COUNTED = {
    "tied": (TIED, [0, 1, 1, 0, 1, 1]),
    "all tied": ([1.0] * 6, [1, 1, 1, 1, 0, 0]),
    "some have not finished": (LATE, [1, 0, 0, 1, 0, 0]),
    "none has finished": ([np.inf] * 6, [0] * 6),
}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("mode", [slow("checked"), "vmap"])
def test_measured_times_choose_the_first(mode: str, whole: bool) -> None:
    updates = np.random.default_rng(0).normal(size=(WORKERS, 5)).astype(np.float32)
    for times, counts in COUNTED.values():
        seconds = jnp.asarray(times, jnp.float32)
        found = np.broadcast_to(measured(mode, whole)(updates, seconds, seconds), updates.shape)
        expected = np.asarray(counts) @ updates / max(sum(counts), 1)
        np.testing.assert_allclose(found, np.tile(expected, (WORKERS, 1)), rtol=0, atol=1e-6)


def test_only_measured_times_are_sent() -> None:
    arguments = jnp.zeros((WORKERS, 5)), jnp.zeros(WORKERS), jnp.zeros(WORKERS)
    own, of_all = (
        jaxcomm.wire.account(measured("checked", whole), *arguments).bytes_per_worker
        for whole in (False, True)
    )
    assert of_all == pytest.approx(2 * 5 / 6 * (5 * 4 + 4))  # The mean, and the sum of weights.
    assert own - of_all == pytest.approx(4 * (WORKERS - 1))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_dropped_worker_does_not_count_whatever_it_has(value: float) -> None:
    times = jnp.arange(6.0)  # The last two are dropped.
    updates = jnp.ones((WORKERS, 5))
    run = measured("vmap", False)
    np.testing.assert_array_equal(run(updates.at[5, 2].set(value), times, times), 1)
    found = run(updates.at[3, 2].set(value), times, times)
    assert not np.isfinite(found[:, 2]).any()


def test_weights_are_those_of_the_first() -> None:
    weights = np.array([1, 2, 0, 3, 1, 4], np.float32)
    tx, updates = spared(times=TIMES), gradients(WORKERS)
    run, state = aggregator(tx, WORKERS, "vmap", weighted=True), initial(tx, updates, "vmap")
    for counts in first_of(drawn(5)):
        results, state = run(updates, state, weights)
        shares = counts * weights / np.sum(counts * weights)
        np.testing.assert_allclose(flat(results)[0], shares @ flat(updates), rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", [slow("checked"), "vmap"])
def test_a_dropped_residual_is_not_lost(mode: str) -> None:
    """All updates and the residuals add up to the gradients of the workers that counted."""
    steps = 12
    given = np.random.default_rng(0).normal(size=(steps, WORKERS, 20)).astype(np.float32)
    tx = spared(jaxcomm.all_gather_mean(error_feedback(top_k(k=3))), times=TIMES)
    run, state = aggregator(tx, WORKERS, mode), initial(tx, jnp.asarray(given[0]), mode)
    total, kept = np.zeros(20), np.zeros((WORKERS, 20))
    for step, counts in enumerate(first_of(drawn(steps))):
        results, state = run(jnp.asarray(given[step]), state, np.ones(WORKERS, np.float32))
        total += np.asarray(results[0], np.float64)
        before, kept = kept, np.asarray(state.inner.own.per_worker["data"][0].kept, np.float64)
        # A dropped worker has sent the largest three of its residual, and nothing else of it.
        for worker in np.flatnonzero(~counts):
            changed = np.flatnonzero(kept[worker] != before[worker])
            largest = np.argsort(-np.abs(before[worker]))[:3]
            assert {*changed} <= {*largest} and np.all(kept[worker][changed] == 0)
    counted = first_of(drawn(steps))[..., None] * given.astype(np.float64) / FIRST
    np.testing.assert_allclose(total + kept.mean(axis=0), counted.sum(axis=(0, 1)), atol=1e-5)
    assert np.abs(kept).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in WEIGHTED if c.name != "parallax"], ids=repr)
def test_around_any_row_it_is_the_row_with_weights(case: Case) -> None:
    updates, inner = gradients(WORKERS), case.make()
    tx = spared(inner, times=TIMES)
    (counts,) = first_of(drawn(1)).astype(np.float32)
    plain, ones = aggregator(inner, WORKERS, "checked", weighted=True), np.ones(WORKERS)
    expected, _ = plain(updates, initial(inner, updates, "checked"), counts)
    found, _ = aggregator(tx, WORKERS, "checked")(updates, initial(tx, updates, "checked"), ones)
    np.testing.assert_array_equal(flat(found), flat(expected))


@pytest.mark.slow
def test_with_a_clock_on_meshes_of_both_kinds() -> None:
    """The times of all workers are an extra argument of the step, as of a clock outside of it."""
    tx = optax.chain(spared(jaxcomm.all_reduce_mean(blockwise(dither(bits=8), 4))), optax.sgd(1.0))
    batch = np.random.default_rng(0).normal(size=(WORKERS, 8)).astype(np.float32)
    devices, found = jax.devices()[:WORKERS], []
    kinds = (AxisType.Auto, AxisType.Explicit)
    meshes = [
        jax.make_mesh((WORKERS,), ("data",), axis_types=(kind,), devices=devices) for kind in kinds
    ]
    for where in (WORKERS, *meshes):
        make = jaxcomm.simulate if isinstance(where, int) else jaxcomm.make_step
        step = make(lambda w, x: jnp.sum(x[0] * w), tx, where, donate=False)
        params, state = jnp.zeros(8), jaxcomm.init(tx, jnp.zeros(8), where)
        for times in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]):
            seconds = jnp.asarray(times, jnp.float32)
            params, state, _ = step(params, state, batch, finish_times=seconds)
        found.append(np.asarray(params))
    exact = -(batch[:4].mean(axis=0) + batch[2:].mean(axis=0))
    np.testing.assert_allclose(found[0], exact, atol=0.6)
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=0, atol=1e-6)


def test_without_backups_it_is_the_aggregator() -> None:
    tx = jaxcomm.majority_vote()
    assert jaxcomm.backup(tx, 0) is tx


@pytest.mark.parametrize("backups", [6, 7])
def test_at_least_one_worker_must_count(backups: int) -> None:
    tx, updates = spared(backups=backups, times=TIMES), jnp.zeros((WORKERS, 2))
    with pytest.raises(ValueError, match=f"`backups`={backups} must be less than the 6 workers"):
        jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data")(updates)


def update_with(tx: Any, **extra: Any) -> None:
    x = jnp.zeros((WORKERS, 2))
    jax.eval_shape(jax.vmap(lambda x: tx.update(x, tx.init(x), **extra)[0], axis_name="data"), x)


def test_mistakes_are_named() -> None:
    for wrong in (-1, 1.0, True):
        with pytest.raises(ValueError, match="`backups` must be a Python int of at least 0"):
            spared(backups=wrong)
    with pytest.raises(ValueError, match="`backup` takes aggregators"):
        spared(optax.sgd(0.1))
    for wrong in (None, jnp.zeros(5)):
        with pytest.raises(ValueError, match=r"finish_times=\)` must be a scalar .* shape \(6,\)"):
            update_with(spared(), finish_times=wrong)
    with pytest.raises(ValueError, match="leave out `finish_times`"):
        update_with(spared(times=TIMES), finish_times=jnp.zeros(WORKERS))
    with pytest.raises(ValueError, match="`weight`"):
        update_with(spared(jaxcomm.majority_vote(), times=TIMES))
    on_mesh = jax.shard_map(
        lambda x: spared().update(x[0], spared().init(x[0]), finish_times=jnp.tile(x[0, 0], 6))[0],
        mesh=mesh_of(WORKERS),
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec(),
    )
    with pytest.raises(ValueError, match="equal on all of them"):
        jax.eval_shape(on_mesh, jnp.zeros((WORKERS, 2)))
