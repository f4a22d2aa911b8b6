"""The mean over the workers that finish first, around any aggregator that takes weights."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxcomm
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import top_k
from jaxcomm.synchronization import shifted_exponential
from tests.aggregation.runs import refuse, simulated, steps
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


def test_each_step_is_the_mean_over_the_fastest() -> None:
    """As drawn from the seed, by whomever; and over time neither biased nor of another variance."""
    updates, number = gradients(WORKERS), 4000
    found, rows = draws(spared(times=TIMES), updates, number), flat(updates)
    counts = first_of(drawn(number))
    np.testing.assert_allclose(found, counts @ rows / FIRST, rtol=0, atol=1e-6)
    # Sampling without replacement has these moments.
    variance = rows.var(axis=0, ddof=1) * (1 / FIRST - 1 / WORKERS)
    off = np.abs(found.mean(axis=0) - rows.mean(axis=0))
    assert np.all(off <= 5 * (variance / number) ** 0.5)
    np.testing.assert_allclose(found.var(axis=0), variance, rtol=0.15)


def measured(x: jax.Array, times: jax.Array) -> jax.Array:
    """One step for times of a worker, or for those of all of them."""
    tx = spared()
    result: jax.Array = tx.update(x, tx.init(x), finish_times=times)[0]
    return result


@functools.cache
def on_mesh(whole: bool) -> Any:
    data = PartitionSpec("data")
    local = lambda x, times: measured(x[0], times if whole else times[0])  # noqa: E731
    specs = data, PartitionSpec() if whole else data
    mesh = mesh_of(WORKERS)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec()))


@functools.cache
def under_vmap(whole: bool) -> Any:
    return jax.jit(jax.vmap(measured, in_axes=(0, None if whole else 0), axis_name="data"))


COUNTED = {
    "tied": ([3.0, 1.0, 1.0, 2.0, 1.0, 1.0], [0, 1, 1, 0, 1, 1]),
    "all tied": ([1.0] * 6, [1, 1, 1, 1, 0, 0]),
    "some have not finished": ([1.0, np.nan, np.inf, 0.0, np.inf, np.nan], [1, 0, 0, 1, 0, 0]),
    "none has finished": ([np.inf] * 6, [0] * 6),
}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("run", [slow(on_mesh), under_vmap])
def test_measured_times_select_the_fastest(run: Any, whole: bool) -> None:
    updates = np.random.default_rng(0).normal(size=(WORKERS, 5)).astype(np.float32)
    for times, counts in COUNTED.values():
        found = np.broadcast_to(run(whole)(updates, jnp.asarray(times)), updates.shape)
        expected = np.asarray(counts) @ updates / max(sum(counts), 1)
        np.testing.assert_allclose(found, np.tile(expected, (WORKERS, 1)), rtol=0, atol=1e-6)


def test_only_measured_times_are_sent() -> None:
    own, of_all = (
        jaxcomm.wire.account(on_mesh(whole), jnp.zeros((6, 5)), jnp.zeros(6)).bytes_per_worker
        for whole in (False, True)
    )
    assert of_all == pytest.approx(2 * 5 / 6 * (5 * 4 + 4))  # The mean, and the sum of weights.
    assert own - of_all == pytest.approx(4 * (WORKERS - 1))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_dropped_workers_do_not_count(value: float) -> None:
    times, updates = jnp.arange(6.0), jnp.ones((WORKERS, 5))  # The last two are dropped.
    kept, spoiled = (under_vmap(False)(updates.at[i, 2].set(value), times) for i in (5, 3))
    np.testing.assert_array_equal(kept, 1)
    assert not np.isfinite(spoiled[:, 2]).any()


def test_weights_are_those_of_the_fastest() -> None:
    weights, updates = np.array([1, 2, 0, 3, 1, 4]), gradients(WORKERS)
    found = steps(spared(times=TIMES), [updates] * 5, weights=[weights] * 5)
    for (results, _), counts in zip(found, first_of(drawn(5)), strict=True):
        expected = np.average(flat(updates), axis=0, weights=counts * weights)
        np.testing.assert_allclose(flat(results)[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", [slow("checked"), "vmap"])
def test_a_dropped_residual_is_not_lost(mode: Any) -> None:
    """All updates and the residuals add up to the gradients of the workers that counted."""
    number = 12
    given = np.random.default_rng(0).normal(size=(number, WORKERS, 20)).astype(np.float32)
    tx = spared(jaxcomm.all_gather_mean(error_feedback(top_k(k=3))), times=TIMES)
    all_counts, total, kept = first_of(drawn(number)), np.zeros(20), np.zeros((WORKERS, 20))
    for counts, (results, state) in zip(all_counts, steps(tx, given, mode), strict=True):
        total += np.asarray(results[0], np.float64)
        before, kept = kept, np.asarray(state.inner.own.per_worker["data"][0].kept, np.float64)
        # A dropped worker has sent the largest three of its residual, and nothing else of it.
        for worker in np.flatnonzero(~counts):
            changed = np.flatnonzero(kept[worker] != before[worker])
            largest = np.argsort(-np.abs(before[worker]))[:3]
            assert {*changed} <= {*largest} and np.all(kept[worker][changed] == 0)
    counted = np.sum(all_counts[..., None] * given.astype(np.float64) / FIRST, axis=(0, 1))
    np.testing.assert_allclose(total + kept.mean(axis=0), counted, atol=1e-5)
    assert np.abs(kept).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in WEIGHTED if c.name != "parallax"], ids=repr)
def test_around_any_method_it_equals_the_method_with_weights(case: Case) -> None:
    updates, inner = gradients(WORKERS), case.make()
    tx = spared(inner, times=TIMES)
    (counts,) = first_of(drawn(1)).astype(np.float32)
    plain, ones = aggregator(inner, WORKERS, "checked", weighted=True), np.ones(WORKERS)
    expected, _ = plain(updates, initial(inner, updates, "checked"), counts)
    found, _ = aggregator(tx, WORKERS, "checked")(updates, initial(tx, updates, "checked"), ones)
    np.testing.assert_array_equal(flat(found), flat(expected))


def test_without_backups_it_equals_the_aggregator() -> None:
    tx = jaxcomm.majority_vote()
    assert jaxcomm.backup(tx, 0) is tx


def update_with(tx: Any, **extra: Any) -> Any:
    return lambda: simulated(tx, jnp.zeros((WORKERS, 2)), **extra)


MISTAKES = {
    "no worker counts": (update_with(spared(backups=6, times=TIMES)), "less than the 6 workers"),
    "no times": (update_with(spared()), r"finish_times=\)` must be a scalar .* shape \(6,\)"),
    "times that differ": (
        lambda: jax.shard_map(
            lambda x: measured(x[0], jnp.tile(x[0, 0], 6)),
            mesh=mesh_of(WORKERS),
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec(),
        )(jnp.zeros((WORKERS, 2))),
        "equal on all of them",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake: str) -> None:
    refuse(MISTAKES[mistake][1], MISTAKES[mistake][0])
