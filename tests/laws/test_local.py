"""Local methods: weights in averaging rounds, the effect of one worker's NaN, dtypes, meshes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm.aggregation._skip_nonfinite import SkipNonfiniteState
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import nonzero, top_k
from jaxcomm.testing import LOCAL_LAWS, LocalTrial
from jaxcomm.testing._local import local_laws_of
from tests.cases._local import (
    LOCAL,
    PERIOD,
    RECIPES,
    LocalCase,
    by_hand,
    neutral,
)
from tests.mutants import Mutant, mutable, mutated
from tests.slow import slow
from tests.workers import flat, mesh_of, meshes_of, trained_by_hand, trained_by_steps

N, STEPS, SIZES = 4, 9, {"a": 2, "b": 3}
RNG = np.random.default_rng(0)
START = RNG.normal(size=(N, 5)).astype(np.float32)
GRADIENTS = RNG.normal(size=(STEPS, N, 5)).astype(np.float32)
ONES, ALL = np.ones((STEPS, N), np.float32), np.ones((STEPS, N), bool)


def leaves_of(x: Any) -> dict[str, Any]:
    """Two leaves of one array, along its last axis."""
    return {"a": x[..., : SIZES["a"]], "b": x[..., SIZES["a"] :]}


def given(loss_fn: Any, params: Any, batch: Any) -> Any:
    """Gradients, and weights where there are any, are the batch."""
    del loss_fn
    gradient, *weight = jax.tree.map(lambda x: x[0], batch)
    like = jax.tree.map(lambda g, x: g.astype(x.dtype), gradient, params)
    return jnp.zeros((), jnp.float32), like, *weight


@functools.cache
def scanned(tx: Any, where: Any, masked: bool) -> Any:
    """`(params, state, batches, masks) -> (params after each step, state, metrics)`."""
    make = jaxcomm.simulate if isinstance(where, int) else jaxcomm.make_step
    step = make(lambda w, x: jnp.zeros(()), tx, where, gradients=given, donate=False)

    def body(carry: Any, of_step: Any) -> Any:
        batch, present = of_step
        extra = {"present": present} if masked else {}
        params, state, metrics = step(*carry, batch, **extra)
        return (params, state), (params, metrics)

    def run(params: Any, state: Any, batches: Any, masks: Any) -> Any:
        (_, state), (found, metrics) = jax.lax.scan(body, (params, state), (batches, masks))
        return found, state, metrics

    return jax.jit(run)


@functools.cache
def first_state(tx: Any, where: Any) -> Any:
    return jaxcomm.init(tx, jaxcomm.PerWorker({"data": leaves_of(jnp.asarray(START))}), where)


def train(
    tx: Any,
    gradients: np.ndarray = GRADIENTS,
    weights: np.ndarray | None = None,
    present: np.ndarray | None = None,
    *,
    start: Any = START,
    where: Any = N,
    mutant: Mutant | None = None,
) -> tuple[np.ndarray, Any, Any]:
    """All workers' parameters after each step [steps, n, d], the last state, and the metrics."""
    params = jaxcomm.PerWorker({"data": leaves_of(jnp.asarray(start))})
    batches = leaves_of(gradients), *([] if weights is None else [weights])
    masks = np.ones(gradients.shape[:2], bool) if present is None else present
    state = first_state(tx, where) if start is START else jaxcomm.init(tx, params, where)
    if mutant:
        state = mutated(state, mutant)
    found, state, metrics = scanned(tx, where, present is not None)(params, state, batches, masks)
    both = found.per_worker["data"]
    return np.concatenate([np.asarray(both["a"]), np.asarray(both["b"])], axis=-1), state, metrics


def floats(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]


@pytest.mark.parametrize("case", LOCAL)
def test_weights_absence_and_nan_follow_the_equation(case: LocalCase) -> None:
    """One program: weights that differ by step, some 0, over a NaN; workers that are absent."""
    weights = RNG.integers(0, 3, (STEPS, N)).astype(np.float32)
    gradients, present = GRADIENTS.copy(), ALL.copy()
    gradients[1, 2, 3] = np.nan
    gradients[4, 1] = np.inf
    weights[7, 0], gradients[7, 0] = 0, np.nan  # A mean over nothing.
    weights[1, 2] = weights[4, 1] = 2
    present[PERIOD - 1, 1] = False  # At the first averaging round.
    tx = neutral(case, PERIOD)
    found, _, metrics = train(tx, gradients, weights, present)
    expected = by_hand(START, gradients, weights, present, PERIOD)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    skipped_steps = metrics["diagnostics/skipped_steps"]  # Of present workers only.
    np.testing.assert_array_equal(skipped_steps[PERIOD - 1 :: PERIOD], [1, 2, 2])
    # All weights are 1, or there are none.
    ones, _, _ = train(tx, GRADIENTS, ONES, ALL)
    np.testing.assert_array_equal(train(tx)[0], ones)
    np.testing.assert_allclose(ones, by_hand(START, GRADIENTS, ONES, ALL, PERIOD), atol=1e-5)
    # If no worker moves, averaging rounds keep the mean.
    still, _, _ = train(tx, 0 * GRADIENTS, ONES, ALL)
    np.testing.assert_allclose(still.mean(axis=1), [START.mean(axis=0)] * STEPS, atol=1e-6)
    # A wrong weight makes the mean NaN for all workers.
    for wrong in (-1.0, np.nan, np.inf):
        bad = ONES.copy()
        bad[0, 3] = wrong
        for own in (GRADIENTS, np.where(np.arange(N)[:, None] == 3, np.nan, GRADIENTS)):
            assert np.isnan(train(tx, own, bad, ALL)[0][PERIOD - 1 :]).all()


@functools.cache
def trial_of(case: LocalCase, workers: int) -> LocalTrial:
    return LocalTrial(case.make(optax.sgd(0.1, momentum=0.5)), PERIOD, workers, agree=case.agree)


def _law(law: str) -> Any:
    """A law of `jaxcomm.testing.LOCAL_LAWS`, for every row: `law[method]`."""
    others = (8, 1) if law == "modes" else ()

    @pytest.mark.parametrize("workers", [N, *others])
    @pytest.mark.parametrize(
        "case", [c for c in (*LOCAL, *RECIPES) if law in local_laws_of(trial_of(c, N))], ids=repr
    )
    def test(case: LocalCase, workers: int) -> None:
        LOCAL_LAWS[law](trial_of(case, workers))

    return test


globals().update({f"test_{law.replace(' ', '_')}": _law(law) for law in LOCAL_LAWS})


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in LOCAL if case.aggregates], ids=repr)
def test_an_overflowing_mean_leaves_workers_unchanged(case: LocalCase) -> None:
    """One coordinate fits, all do not; the next averaging round includes their movements."""
    fits = jaxcomm.all_gather_mean(nonzero(density=0.25, granularity="element"))
    tx = case.neutral(optax.sgd(1.0), PERIOD, aggregator=fits)
    few = np.where(np.arange(5) == 0, GRADIENTS, 0)
    many, failed = few.copy(), 2 * PERIOD - 1
    many[failed - 1] += 1
    many[failed + 2] -= 1
    found, state, metrics = train(tx, many, start=0 * START)
    expected, _, plain = train(tx, few, start=0 * START)
    assert all(np.isfinite(x).all() for x in (found, *floats(state)))
    assert np.ptp(expected[failed], axis=0).max() < 1e-6 < np.ptp(found[failed], axis=0).max()
    np.testing.assert_allclose(found[-1], expected[-1], rtol=1e-5, atol=1e-5)
    assert not plain["diagnostics/skipped_exchanges"].any()
    np.testing.assert_array_equal(
        metrics["diagnostics/skipped_exchanges"], np.arange(STEPS) >= failed
    )


@functools.cache
def _mutable(case: LocalCase) -> Any:
    return mutable(neutral(case, PERIOD), N)


def check_equation(case: LocalCase, mutant: Mutant) -> None:
    """Local SGD of the mean, in which a NaN excludes a worker until the next averaging round."""
    gradients = GRADIENTS.copy()
    gradients[1, 2, 3] = np.nan
    found, _, _ = train(_mutable(case), gradients, mutant=mutant)
    expected = by_hand(START, gradients, ONES, ALL, PERIOD)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


PLACES = ["nowhere", "whole", "inner", "aggregator"]
WORKERS, BATCHES = 8, 120


def placed(case: LocalCase, place: str) -> Any:
    inner = optax.sgd(0.1, momentum=0.5)
    if place == "inner":
        inner = jaxcomm.skip_nonfinite(inner)
    if place == "aggregator":
        remembers = jaxcomm.all_gather_mean(error_feedback(top_k(ratio=0.8)))
        return case.make(inner, aggregator=jaxcomm.skip_nonfinite(remembers))
    tx = case.make(inner)
    return jaxcomm.skip_nonfinite(tx) if place == "whole" else tx


def towards(w: Any, batch: Any) -> jax.Array:
    return sum(0.5 * jnp.sum((x - batch[0]) ** 2) for x in jax.tree.leaves(w))


@functools.cache
def of_targets(tx: Any) -> Any:
    step = jaxcomm.simulate(towards, tx, WORKERS, donate=False)

    @jax.jit
    def run(params: Any, state: Any, targets: Any) -> Any:
        def body(carry: Any, batch: Any) -> Any:
            params, state, metrics = step(*carry, batch)
            return (params, state), (params, state, metrics)

        return jax.lax.scan(body, (params, state), targets)[1]

    return run


@pytest.mark.parametrize(
    ("case", "place"),
    [
        (case, place)
        for case in LOCAL
        for place in PLACES
        if place != "aggregator" or case.aggregates
    ],
)
def test_a_nan_stays_on_its_worker_and_is_counted(case: LocalCase, place: str) -> None:
    """Worker i is drawn to i, so that all are drawn to 3.5."""
    tx = placed(case, place)
    run = of_targets(tx)
    params = jaxcomm.replicate(leaves_of(jnp.zeros(5)), WORKERS)
    state = jaxcomm.init(tx, params, WORKERS)
    targets = np.tile(np.arange(WORKERS, dtype=np.float32), (BATCHES, 1))
    plain, _, _ = run(params, state, targets)
    nan, meeting = PERIOD + 1, 2 * PERIOD - 1  # Between averaging rounds, of fragments too.
    broken = targets.copy()
    broken[nan, 4] = np.nan
    found, states, metrics = run(params, state, broken)
    assert all(np.isfinite(x).all() for x in floats((found, states)))
    both = [np.asarray(x.per_worker["data"]["b"])[..., 0] for x in (found, plain)]
    healthy = np.arange(WORKERS) != 4
    if place in ("nowhere", "aggregator"):
        np.testing.assert_array_equal(*(x[:meeting, healthy] for x in both))
        counts = sum(v for k, v in metrics.items() if k.endswith("skipped_steps"))
        assert (counts[:meeting] == 0).all() and (counts[meeting:] == 1).all()
        last = jax.tree.map(lambda x: x[-1], states)
        assert case.meets(last).diagnostics["skipped_steps"] == 1
    else:
        wraps = lambda node: isinstance(node, SkipNonfiniteState)  # noqa: E731
        wrappers = [node for node in jax.tree.leaves(states, is_leaf=wraps) if wraps(node)]
        assert [np.max(np.asarray(node.skipped_steps)[-1]) for node in wrappers] == [1]
        counts = sum(v for k, v in metrics.items() if k.endswith("skipped_steps"))
        assert not any("//" in name for name in metrics)
        np.testing.assert_array_equal(counts, np.arange(BATCHES) >= nan)
    means = [x.mean(axis=1) for x in both]
    if place == "whole":  # Steps come one later, and are the same.
        np.testing.assert_allclose(means[0][nan + 1 :], means[1][nan:-1], rtol=1e-5)
        return
    if case.agree:
        np.testing.assert_allclose(np.ptp(both[0][meeting]), 0, atol=1e-5)
    # No worker loses progress: the mean differs by a step of one worker, or of all.
    np.testing.assert_allclose(*means, atol=0.8)
    np.testing.assert_allclose(means[0][-1], means[1][-1], atol=0.05)
    if place != "aggregator":  # Feedback and momentum oscillate for long.
        np.testing.assert_allclose(means[0][-1], 3.5, atol=0.05)


@pytest.mark.parametrize("dtype", ["bfloat16", slow("float32"), slow("float64")])
@pytest.mark.parametrize("case", [case for case in LOCAL if case.anchored])
def test_small_steps_accumulate_in_any_dtype(case: LocalCase, dtype: str) -> None:
    """What 16 bits cannot hold, a quarter of their spacing, the anchor keeps."""
    with jax.enable_x64(dtype == "float64"):
        narrow, wide = dtype == "bfloat16", np.dtype("float64" if dtype == "float64" else "float32")
        small = float(jnp.finfo(dtype).eps) * (1 / 4 if narrow else 4)
        start, steps = jnp.ones((N, 5), dtype), np.full((64, N, 5), -small, wide)
        # Between averaging rounds a worker has only its parameters, so one of three steps is kept.
        for period, kept in ((1, 64), *([(PERIOD, 64 // PERIOD)] if narrow else [])):
            found, state, _ = train(case.neutral(optax.sgd(1.0), period), steps, start=start)
            assert found.dtype == dtype
            meetings = map(np.asarray, jax.tree.leaves(case.meets(state)))
            assert {x.dtype for x in meetings if x.size in SIZES.values()} == {wide}
            off = found[-1].astype(np.float64) - (1 + kept * small)
            assert np.abs(off).max() <= (2 * small if narrow else 0)


@pytest.mark.parametrize("case", LOCAL)
def test_float64_survives_a_float32_weight(case: LocalCase) -> None:
    """If one worker has skipped a step, shares are 3/11 and 2/11."""
    with jax.enable_x64(True):
        gradients = GRADIENTS[:PERIOD].astype(np.float64)
        gradients[1, 2] = np.nan
        found, _, _ = train(case.neutral(optax.sgd(1.0), PERIOD), gradients, start=np.zeros((N, 5)))
        moved, counts = -np.nansum(gradients, axis=0), np.array([[3], [3], [2], [3]])
        expected = np.sum(moved * counts, axis=0) / 11
        np.testing.assert_allclose(found[-1], [expected] * N, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("case", [*LOCAL, *RECIPES], ids=repr)
def test_a_scan_equals_single_steps(case: LocalCase, checked: bool) -> None:
    """`tx.init` and the loop are inside `jax.shard_map`, unchecked with plain `jax.grad`."""
    tx, mesh = case.make(optax.sgd(0.1, momentum=0.5)), meshes_of(N)[0 if checked else 1]
    params, batches = leaves_of(jnp.asarray(START[0])), leaves_of(GRADIENTS)
    found = trained_by_hand(tx, params, batches, mesh, differ=True, checked=checked)
    expected = trained_by_steps(tx, params, batches, mesh, differ=True)
    np.testing.assert_allclose(flat(found), flat(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", [*LOCAL, *RECIPES], ids=repr)
def test_state_of_other_workers_is_refused(case: LocalCase) -> None:
    """By steps, and in a custom step."""
    tx = case.make(optax.sgd(0.1))  # SGD has no state, so the method must raise the error.
    params = jaxcomm.replicate(leaves_of(jnp.zeros(5)), 2 * N)
    state, own = jaxcomm.init(tx, params, 2 * N), jaxcomm.replicate(leaves_of(jnp.zeros(5)), N)
    with pytest.raises(ValueError, match="is for 8 workers, but there are 4"):
        jaxcomm.simulate(towards, tx, N)(own, state, jnp.zeros(N))

    def one(params: Any, state: Any) -> Any:
        zeros, x = (jax.tree.map(lambda x: x[0], tree.per_worker["data"]) for tree in params)
        return tx.update(zeros, state, x)[1]

    specs = jaxcomm.state_specs(((own, own), state))
    step = jax.shard_map(one, mesh=mesh_of(N), in_specs=specs, out_specs=specs[1])
    with pytest.raises(ValueError, match="is for 8 workers, but there are 4 over 'data'"):
        jax.eval_shape(step, (own, own), state)


@pytest.mark.parametrize("case", [*LOCAL, *RECIPES], ids=repr)
def test_mistakes(case: LocalCase) -> None:
    tx = case.make(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"`present` must have one bool per worker, bool\[4\]"):
        train(tx, present=np.ones((STEPS, N - 1), bool))
    with pytest.raises(ValueError, match="`weight` must be a scalar"):
        train(tx, weights=np.ones((STEPS, N, 2), np.float32))
