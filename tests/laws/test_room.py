"""What finds no room is never lost in silence: it is kept, or the update is NaN, or it is told."""

import inspect
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm import compression
from jaxcomm.compression import blockwise, feedback, quantizers, rotated, sketches, sparsifiers
from tests.cases._crowded import COLUMNS, CROWDED, FITTING, ROWS, Crowded
from tests.codecs import send
from tests.slow import slow
from tests.workers import aggregator, initial

WORKERS, MORE_STEPS = 4, 9
ONES = np.ones(WORKERS, np.float32)


def filled(rows: int) -> Any:
    """Of each worker so many rows that are not zero, the same on all; and a leaf that is zero."""
    rng = np.random.default_rng(2)
    x = np.zeros((WORKERS, ROWS, COLUMNS), np.float32)
    x[:, :rows] = rng.uniform(0.5, 1, (WORKERS, rows, COLUMNS)) * rng.choice([-1, 1], (rows, 1))
    return {"crowded": jnp.asarray(x), "empty": jnp.zeros((WORKERS, ROWS, COLUMNS))}


def leaf(state: Any, own: Any) -> np.ndarray:
    return np.asarray(own(state), np.float64)


def crowded(cases: list[Crowded]) -> list:
    return [slow(case) if case.slow else case for case in cases]


def of_info(state: Any) -> float:
    return float(state.info["overflow"])


@pytest.mark.parametrize("case", crowded([c for c in CROWDED if not c.keeps]), ids=repr)
def test_without_feedback_it_is_nan_on_all_and_changes_no_memory(case: Crowded) -> None:
    tx, too_much = case.make("nan"), filled(case.filled)
    run, before = aggregator(tx, WORKERS, "vmap"), initial(tx, too_much, "vmap")
    results, after = run(too_much, before, ONES)
    for result in jax.tree.leaves(results):
        assert np.isnan(np.asarray(result)).all()
    for one, other in zip(
        jax.tree.leaves((before.own, before.shared)),
        jax.tree.leaves((after.own, after.shared)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)
    if "overflow" in after.info:
        assert of_info(after) > 0  # Why it is NaN.
    # What fits is not: the next step is as if nothing had been.
    fits = filled(FITTING)
    results, after = run(fits, after, ONES)
    assert np.isfinite(np.asarray(results["crowded"])).all()
    if case.exact:
        mean = np.asarray(fits["crowded"], np.float64).mean(axis=0)
        np.testing.assert_allclose(results["crowded"][0], mean, atol=1e-6)
    if "overflow" in after.info:
        assert of_info(after) == 0


@pytest.mark.parametrize("case", crowded([c for c in CROWDED if not c.keeps]), ids=repr)
def test_where_it_is_dropped_the_metric_tells(case: Crowded) -> None:
    tx, too_much = case.make("drop"), filled(case.filled)
    run, state = aggregator(tx, WORKERS, "vmap"), initial(tx, too_much, "vmap")
    results, state = run(too_much, state, ONES)
    assert np.isfinite(np.asarray(results["crowded"])).all()
    told = of_info(state)
    assert told > 0 if case.lost is None else told == pytest.approx(case.lost)
    assert of_info(run(filled(FITTING), state, ONES)[1]) == 0


@pytest.mark.parametrize("case", crowded([c for c in CROWDED if c.keeps]), ids=repr)
def test_feedback_loses_nothing(case: Crowded) -> None:
    tx, too_much = case.make("nan"), filled(case.filled)
    run, state = aggregator(tx, WORKERS, "vmap"), initial(tx, too_much, "vmap")
    nothing = jax.tree.map(jnp.zeros_like, too_much)
    total = np.zeros((ROWS, COLUMNS))
    for step in range(1 + MORE_STEPS):
        results, state = run(nothing if step else too_much, state, ONES)
        if not step and case.lost is not None:
            assert of_info(state) == case.lost
        total += np.asarray(results["crowded"], np.float64)[0]
    kept = 0 if case.residual is None else leaf(state, case.residual).mean(axis=0)
    given = np.asarray(too_much["crowded"], np.float64).mean(axis=0)
    np.testing.assert_allclose(total + kept, given, atol=2e-6)
    assert np.any(total != 0)


def _public(module: ModuleType) -> list[Any]:
    return [getattr(module, name) for name in module.__all__]


def test_everything_with_the_option_is_in_the_table() -> None:
    modules = (jaxcomm, compression, quantizers, sparsifiers, sketches, feedback)
    having = {
        function
        for module in modules
        for function in _public(module)
        if inspect.isfunction(function) and "overflow" in inspect.signature(function).parameters
    }
    assert having == {each for case in CROWDED if not case.keeps for each in case.of}


WRAPPERS = {
    "scaled": lambda codec: compression.scaled(codec),
    "local_clip": lambda codec: feedback.local_clip(codec, 100.0),
    "momentum": lambda codec: feedback.momentum(codec, 0.0),
    "momentum_correction": lambda codec: feedback.momentum_correction(codec, 0.0),
    "blockwise": lambda codec: blockwise(codec, 64),
    "rotated": rotated,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_wrap_both_forms(name: str) -> None:
    strict = sketches.s2_sketch(density=0.25, ratio=1.0, granularity="element")
    wrapped, x = WRAPPERS[name](strict), jnp.arange(1.0, 65.0)
    q, _ = send(wrapped, wrapped.init(x), x)
    assert np.isnan(q).all()
    q, _ = send(wrapped.dropping, wrapped.init(x), x)
    expected, _ = send(WRAPPERS[name](strict.dropping), wrapped.init(x), x)
    np.testing.assert_array_equal(q, expected)
    assert np.isfinite(q).all()


@pytest.mark.parametrize("keep", [feedback.ecq, feedback.diana])
def test_feedback_of_the_unbiased_drops_too(keep: Any) -> None:
    codec, x = sketches.s2_sketch(density=0.5, ratio=1.0, granularity="element"), jnp.ones(16)
    q, _ = send(keep(codec), keep(codec).init(x), x)
    assert keep(codec).dropping is None and np.isfinite(q).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda **o: sparsifiers.nonzero(density=0.5, **o),
        lambda **o: sparsifiers.threshold(1.0, k=1, **o),
        lambda **o: jaxcomm.sparse_global_qsgd(capacity=1, **o),
        lambda **o: jaxcomm.s2_reducer(density=0.5, ratio=1, **o),
    ],
)
def test_other_words_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"`overflow` must be one of .'nan', 'drop'., got 'keep'"):
        make(overflow="keep")
