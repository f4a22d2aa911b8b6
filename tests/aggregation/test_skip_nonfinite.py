"""Steps that all workers leave out together, where one alone has a NaN."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import skip_nonfinite
from jaxcomm.compression.sparsifiers import nonzero
from tests.aggregation.runs import (
    WHERE,
    WORKERS,
    compiled,
    last,
    prepared,
    refuse,
    require_same,
    sent,
    steps,
)
from tests.aggregation.test_memory import remainders
from tests.slow import slow
from tests.workers import MODE_ROWS, Mode, flat, gradients

INNER = optax.chain(jaxcomm.all_reduce_mean(remainders()), optax.sgd(0.5, momentum=0.9))
TX = skip_nonfinite(INNER)


def poisoned(updates: Any, value: float = np.nan, worker: int = 2) -> Any:
    return {**updates, "kernel": updates["kernel"].at[worker, 1, 1].set(value)}


@pytest.mark.parametrize("mode", MODE_ROWS)
def test_workers_of_weight_0_do_not_decide(mode: Mode) -> None:
    updates, weights = gradients(WORKERS), [[1, 2, 0, 1], [1, np.nan, 0, 1]]
    tx = skip_nonfinite(jaxcomm.mean())
    (results, state), (none, after) = steps(tx, [poisoned(updates), updates], mode, weights)
    expected = np.tile(np.average(flat(updates), axis=0, weights=weights[0]), (WORKERS, 1))
    np.testing.assert_allclose(flat(results), expected, rtol=1e-5, atol=1e-6)
    assert (flat(none) == 0).all() and [state.skipped_steps, after.skipped_steps] == [0, 1]


@pytest.mark.parametrize("mode", ["checked", slow("unchecked")])
def test_one_flag_is_sent_and_the_rest_within_the_condition(mode: Mode) -> None:
    updates = gradients(WORKERS)
    account, alone = sent(TX, updates, mode), sent(INNER, updates, mode)
    (flag,) = [c for c in account.collectives if not c.path]
    assert flag.shape == () and flag.dtype == np.float32
    assert {c.path for c in account.collectives if c is not flag} == {("cond 2/2",)}
    flags = 1 if mode == "checked" else 2  # Types show that the result is equal on all.
    assert account.bytes_per_worker == alone.bytes_per_worker + flags * 2 * 3 / 4 * 4
    found = compiled(TX, updates, mode).collectives
    assert len({c.group for c in found if not c.path}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["checked", "vmap"])
def test_overflowing_means_are_skipped(mode: Mode) -> None:
    sparse, full = jnp.zeros((WORKERS, 8)).at[:, 1].set(1.0), jnp.ones((WORKERS, 8))
    few = jaxcomm.all_gather_mean(nonzero(density=0.25, granularity="element"))
    tx = skip_nonfinite(optax.chain(few, optax.sgd(1.0, momentum=0.5)))
    (_, state), (result, after), (later, _) = steps(tx, [sparse, full, sparse], mode)
    assert not np.any(result)
    assert [after.skipped_steps, after.diagnostics["skipped_steps"]] == [1, 1]
    require_same(after.inner, state.inner)
    np.testing.assert_allclose(later, -1.5 * sparse)


def test_around_and_within_accumulate() -> None:
    updates = gradients(WORKERS)
    around = skip_nonfinite(jaxcomm.accumulate(jaxcomm.mean(), 2))
    within = jaxcomm.accumulate(skip_nonfinite(jaxcomm.mean()), 2)
    given = [updates, poisoned(updates), updates]
    for tx, zeros in ((around, [True, True, False]), (within, [True] * 3)):
        assert [(flat(x) == 0).all() for x, _ in steps(tx, given, "checked")] == zeros


@WHERE
@pytest.mark.parametrize(
    ("mean", "most", "batches"),
    [
        (jaxcomm.mean(), 2, "bbgbbbbg"),
        slow(jaxcomm.mean(), None, "bbgbbbbg"),
        slow(jaxcomm.mean(), 0, "gb"),
        slow(jaxcomm.scheduling.wait_free(jaxcomm.mean()), 2, "bbgbbbbg"),
    ],
)
def test_consecutive_skips_are_limited(
    mean: Any, most: int | None, batches: str, where: Any
) -> None:
    good, one = jnp.ones(WORKERS), jnp.float32(0)
    given = {"g": good, "b": good.at[1].set(jnp.inf)}  # The laws have NaN.
    tx = optax.chain(mean, optax.sgd(1.0))
    tx = skip_nonfinite(tx, max_consecutive_errors=most)
    step, state = prepared(lambda w, x: w * jnp.mean(x), tx, one, where)
    reference = optax.apply_if_finite(optax.sgd(1.0), 10**9 if most is None else most)
    w, alone = one, reference.init(one)
    for which in batches:
        w, state, metrics = step(w, state, given[which])
        update, alone = reference.update(jnp.mean(given[which]), alone)
        one = optax.apply_updates(one, update)
        np.testing.assert_array_equal(w, one)
        if not np.isfinite(w):  # What follows depends on how the loss uses the parameters.
            break
        found = metrics["diagnostics/consecutive_errors"]
        assert int(state.consecutive_errors) == int(found) == int(alone.notfinite_count)
    assert np.isfinite(w) == (most is None)


def test_means_of_means_are_refused() -> None:
    twice = optax.chain(jaxcomm.mean(), skip_nonfinite(optax.sgd(0.1)))
    refuse("summed already", lambda: last(twice, [gradients(WORKERS)], "checked"))
