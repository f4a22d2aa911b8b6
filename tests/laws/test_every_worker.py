"""Every worker has weight 1/n, feedback sends the residual later, and a NaN reaches all.

One program a row, at 8 workers, which `tests.mutants` can make wrong without compiling it again:
updates that do not change, for as many steps as feedback needs to catch up, and a NaN at the end.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from jaxcomm.aggregation._warmup import WarmupState
from tests.cases import CASES, Case
from tests.laws.test_resolution import close_to_the_mean
from tests.mutants import WORKERS, Mutant, given, honest, kept, remembers, returned
from tests.workers import aggregator, initial

SIDE = 32  # Updates are square, and so large that roundings of one step average out.
BEFORE = 16  # Steps in which memory converges, if there is any.
REPEATED = 2  # Steps of a row that neither draws nor remembers: of one update, and of its opposite.
NEAR = 0.06  # Less than half of 1/7, by which a mean over a worker too few is off.
NAN = (3, 1, 1)  # The worker and the place.
UPDATES = jax.ShapeDtypeStruct((WORKERS, SIDE, SIDE), jnp.float32)


@functools.cache
def common_and_local_parts() -> tuple[np.ndarray, np.ndarray]:
    """The common part of updates, [d], and the local parts, [n, d], all orthogonal."""
    rng = np.random.default_rng(0)
    patterns = scipy.linalg.hadamard(2 * WORKERS)[1 : WORKERS + 1]
    repeats = SIDE**2 // (2 * WORKERS)
    sizes = 0.3 * rng.uniform(0.2, 1, repeats) * rng.choice([-1, 1], repeats)
    common = np.repeat(sizes, 2 * WORKERS)
    return common, 0.5 * common * np.tile(patterns, (1, repeats))


def close_votes() -> np.ndarray:
    """Five of one sign and three of the other, [n, d]: any vote that turns makes a tie."""
    rng = np.random.default_rng(0)
    majority_vote = np.tile([1, 1, 1, 1, 1, -1, -1, -1], (SIDE**2, 1)) * rng.choice(
        [-1, 1], (SIDE**2, 1)
    )
    return rng.permuted(majority_vote, axis=1).T * rng.uniform(0.1, 0.3, (WORKERS, SIDE**2))


def first_state(case: Case) -> Any:
    return initial(case.make(), UPDATES, "vmap")


@functools.cache
def first_and_counted(case: Case) -> tuple[int, int]:
    """The first step whose result counts, and how many do."""
    if remembers(first_state(case)) or case.converges:
        return BEFORE, case.counted
    return 0, case.counted if case.random else REPEATED


def asked_of(case: Case) -> tuple[int, bool]:
    return sum(first_and_counted(case)), bool(case.result)


@functools.cache
def updates_of(steps: int, voted: bool) -> np.ndarray:
    """[steps, n, d], float32; not to be written to."""
    signs = np.ones((steps, 1, 1))
    if voted:
        signs[1::2] = -0.1
        return (signs * close_votes()).astype(np.float32)
    common, own = common_and_local_parts()
    return (signs * (common + own)).astype(np.float32)


@functools.cache
def shown(steps: int, voted: bool) -> jax.Array:
    """The updates, the last of them once more with a NaN."""
    updates = updates_of(steps, voted)
    every = np.concatenate([updates, updates[-1:]]).reshape(-1, WORKERS, SIDE, SIDE)
    every[-1][NAN] = np.nan
    return jnp.asarray(every)


@functools.cache
def aims_of(case: Case) -> np.ndarray:
    """What the mean over time is held to, [steps, d]."""
    updates = updates_of(*asked_of(case))
    return case.aim(updates) if case.aim else updates.mean(axis=1)


@functools.cache
def _program(tx: Any) -> Any:
    run, ones = aggregator(tx, WORKERS, "vmap"), jnp.ones(WORKERS)

    def steps(updates: jax.Array, state: Any, mutant: Mutant) -> Any:
        def body(now: Any, x: jax.Array) -> Any:
            results, after = run(given(mutant, x), now, ones)
            return kept(mutant, after, state), returned(mutant, results)

        return jax.lax.scan(body, state, updates)

    return jax.jit(steps)


def run(case: Case, mutant: Mutant) -> tuple[np.ndarray, np.ndarray, Any]:
    """Updates [steps, n, d], every worker's results for them and for a NaN, and the last state."""
    asked = asked_of(case)
    state, results = _program(case.make())(shown(*asked), first_state(case), mutant)
    return updates_of(*asked), np.asarray(results), state


def check_every_worker(case: Case, mutant: Mutant) -> None:
    updates, results, state = run(case, mutant)
    one = results[:, :1]
    assert ((results == one) | (np.isnan(results) & np.isnan(one))).all()
    assert np.isnan(results[-1, 0][NAN[1:]])
    found = results[:-1, 0].reshape(len(updates), -1).astype(np.float64)
    if case.result:
        np.testing.assert_array_equal(found, case.result(updates))
        return
    if case.resolution:
        close_to_the_mean(case, updates[0].astype(np.float64), found)
    first, _ = first_and_counted(case)
    check_shares(found[first:].mean(axis=0), aims_of(case)[first:].mean(axis=0), case.shares)
    if case.feedback:
        check_nothing_is_lost(case, updates, found, state)
    if case.converges:
        peak = np.abs(updates).max()
        assert np.abs(found[-1] - updates[-1].mean(axis=0)).max() <= 1e-2 * peak


def check_shares(found: np.ndarray, aim: np.ndarray, off: float) -> None:
    """Means over time, [d], hold all of the common part and most of each local part."""
    common, own = common_and_local_parts()
    assert abs(found @ common / (aim @ common) - 1) <= NEAR
    assert np.all(np.abs(own @ found / (own @ aim) - 1) <= off)


def check_nothing_is_lost(case: Case, updates: np.ndarray, found: np.ndarray, state: Any) -> None:
    """The sent and the kept arrays add up to the input."""
    aggregator = state.inner if isinstance(state, WarmupState) else state
    ((memory,),) = aggregator.own.per_worker.values()
    residual = np.asarray(memory.kept, np.float64).reshape(WORKERS, -1).mean(axis=0)
    weights = case.discount ** np.arange(len(updates))[::-1]
    total = weights @ updates.astype(np.float64).mean(axis=1)
    np.testing.assert_allclose(weights @ found + residual, total, rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_every_worker(case: Case) -> None:
    check_every_worker(case, honest())
