"""What feedback keeps is what means lack: nothing is lost over a run, at either end."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import cast, dither
from jaxcomm.compression.sparsifiers import top_k
from tests.slow import slow
from tests.workers import Mode, aggregator, initial

STEPS = 7
IN_TWO_MODES = pytest.mark.parametrize("mode", ["checked", slow("vmap")])


def draw(workers: int, size: int, seed: int = 0) -> np.ndarray:
    given = np.random.default_rng(seed).standard_t(3, size=(STEPS, workers, size))
    return given.astype(np.float32).astype(np.float64)


def run(
    tx: Any, given: np.ndarray, mode: Mode, weights: np.ndarray | None = None
) -> tuple[np.ndarray, Any]:
    """The sum of all results, and what is remembered at the end."""
    workers = given.shape[1]
    step = aggregator(tx, workers, mode, weighted=weights is not None)
    state = initial(tx, jnp.asarray(given[0], jnp.float32), mode)
    weights = np.ones((STEPS, workers)) if weights is None else weights
    total = np.zeros(given.shape[2])
    for x, w in zip(given, weights, strict=True):
        results, state = step(jnp.asarray(x, jnp.float32), state, jnp.asarray(w, jnp.float32))
        total += np.asarray(results[0], np.float64)
    return total, state.own.per_worker["data"][0]


CODECS = {
    "top_k": top_k(ratio=0.1),
    "bfloat16_values": top_k(ratio=0.25, value_dtype="bfloat16"),
    "bfloat16": cast("bfloat16"),
    "dither": dither(levels=15),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("top_k", "checked"),
        slow("bfloat16_values", "checked"),
        *(slow(name, "vmap") for name in ("top_k", "bfloat16")),
        ("bfloat16_values", "vmap"),
        slow("dither", "vmap"),
    ],
)
def test_gathered(name: str, mode: Mode) -> None:
    given = draw(4, 30)
    total, memory = run(jaxcomm.all_gather_mean(error_feedback(CODECS[name])), given, mode)
    lacking = given.mean(axis=1).sum(axis=0) - total
    np.testing.assert_allclose(lacking, np.mean(memory.kept, axis=0), rtol=0, atol=2e-5)
    assert np.abs(lacking).max() > 1e-3


@IN_TWO_MODES
def test_summed(mode: Mode) -> None:
    given = draw(4, 30)
    total, memory = run(jaxcomm.all_reduce_mean(error_feedback(dither(levels=15))), given, mode)
    lacking = given.mean(axis=1).sum(axis=0) - total
    np.testing.assert_allclose(lacking, np.mean(memory.kept, axis=0), rtol=0, atol=2e-5)
    assert np.abs(lacking).max() > 1e-3


@IN_TWO_MODES
def test_weighted(mode: Mode) -> None:
    given, weights = draw(4, 30), np.random.default_rng(1).integers(0, 5, size=(STEPS, 4))
    weights[:, 0] += 1
    total, memory = run(
        jaxcomm.all_gather_mean(error_feedback(top_k(ratio=0.1))), given, mode, weights
    )
    share = weights / weights.sum(axis=1, keepdims=True)
    lacking = np.einsum("ti,tid->d", share, given) - total
    np.testing.assert_allclose(lacking, np.mean(memory.kept, axis=0), rtol=0, atol=2e-5)
    assert np.abs(lacking).max() > 1e-1


@pytest.mark.slow
@IN_TWO_MODES
@pytest.mark.parametrize(("workers", "size"), [(3, 20), slow(8, 30), slow(8, 5)])
def test_both_ends_of_two_stages(workers: int, size: int, mode: Mode) -> None:
    given = draw(workers, size)
    tx = jaxcomm.two_stage_mean(error_feedback(top_k(ratio=0.3)))
    total, memory = run(tx, given, mode)
    columns = -(-size // workers)
    senders, owners = np.asarray(memory.sent.kept), np.asarray(memory.mean.kept)
    assert senders.shape == (workers, workers, columns) and owners.shape == (workers, columns)
    kept = (senders.mean(axis=0, dtype=np.float64) + owners).ravel()
    lacking = given.mean(axis=1).sum(axis=0) - total
    np.testing.assert_allclose(kept[:size], lacking, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(kept[size:], 0)
    # A row of one coordinate is sent whole; elsewhere both ends hold something back.
    assert columns == 1 or min(np.abs(senders).max(), np.abs(owners).max()) > 0.1


@pytest.mark.quick(1)
@IN_TWO_MODES
@pytest.mark.parametrize("aggregate", [jaxcomm.all_gather_mean, jaxcomm.two_stage_mean])
@pytest.mark.parametrize("skip", [False, True])
def test_a_nan_leaves_what_is_kept_as_it_was(aggregate: Any, skip: bool, mode: Mode) -> None:
    given = draw(3, 20)
    tx = aggregate(error_feedback(top_k(ratio=0.3)))
    tx = jaxcomm.skip_nonfinite(tx) if skip else tx
    step, state = aggregator(tx, 3, mode), initial(tx, jnp.zeros((3, 20)), mode)
    _, before = step(jnp.asarray(given[0], jnp.float32), state, jnp.ones(3))
    bad = jnp.asarray(given[1], jnp.float32).at[1, 4].set(jnp.nan)
    results, after = step(bad, before, jnp.ones(3))
    np.testing.assert_array_equal(results, 0 if skip else np.nan)
    of = lambda state: (state.inner if skip else state).own  # noqa: E731
    chex.assert_trees_all_equal(of(before), of(after))
    results, later = step(jnp.asarray(given[1], jnp.float32), after, jnp.ones(3))
    assert np.isfinite(results).all() and np.any(results != 0)
    assert any(
        np.any(a != b)
        for a, b in zip(*(jax.tree.leaves(of(state)) for state in (after, later)), strict=True)
    )


def test_what_overflows_on_the_way_is_not_kept() -> None:
    tx = jaxcomm.all_gather_mean(error_feedback(top_k(k=1)))
    step = aggregator(tx, 2, "vmap")
    state = initial(tx, jnp.zeros((2, 3)), "vmap")
    for size, finite in ((2e38, True), (2e38, False), (1.0, True)):
        results, state = step(jnp.full((2, 3), size), state, jnp.ones(2))
        assert bool(np.isfinite(results).all()) == finite
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.own))
