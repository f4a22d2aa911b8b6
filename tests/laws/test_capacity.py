"""Values that do not fit are never lost silently: kept, or a NaN update, or reported."""

import inspect
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm import all_gather_mean, compression
from jaxcomm.compression import blockwise, feedback, quantizers, rotated, sketches, sparsifiers
from tests.cases._crowded import COLUMNS, CROWDED, FITTING, ROWS, Crowded
from tests.codecs import send
from tests.slow import slow
from tests.workers import aggregator, flat, initial

WORKERS, MORE_STEPS = 4, 9
ONES = np.ones(WORKERS, np.float32)


def filled(rows: int) -> Any:
    """`rows` rows that are not zero, the same on all workers; and a leaf that is zero."""
    rng = np.random.default_rng(2)
    x = np.zeros((WORKERS, ROWS, COLUMNS), np.float32)
    x[:, :rows] = rng.uniform(0.5, 1, (WORKERS, rows, COLUMNS)) * rng.choice([-1, 1], (rows, 1))
    return {"crowded": jnp.asarray(x), "empty": jnp.zeros((WORKERS, ROWS, COLUMNS))}


def leaf(state: Any, own: Any) -> np.ndarray:
    return np.asarray(own(state), np.float64)


def of_info(state: Any) -> float:
    return float(state.diagnostics["overflow"])


@pytest.mark.parametrize("case", [c for c in CROWDED if not c.keeps], ids=repr)
def test_without_feedback_overflow_is_nan_on_all_workers(case: Crowded) -> None:
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
    if "overflow" in after.diagnostics:
        assert of_info(after) > 0  # Why it is NaN.
    # An update that fits is finite: the next step is unaffected.
    fits = filled(FITTING)
    results, after = run(fits, after, ONES)
    assert np.isfinite(np.asarray(results["crowded"])).all()
    if case.exact:
        mean = np.asarray(fits["crowded"], np.float64).mean(axis=0)
        np.testing.assert_allclose(results["crowded"][0], mean, atol=1e-6)
    if "overflow" in after.diagnostics:
        assert of_info(after) == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CROWDED if not c.keeps], ids=repr)
def test_dropped_overflow_is_reported(case: Crowded) -> None:
    tx, too_much = case.make("drop"), filled(case.filled)
    run, state = aggregator(tx, WORKERS, "vmap"), initial(tx, too_much, "vmap")
    results, state = run(too_much, state, ONES)
    assert np.isfinite(np.asarray(results["crowded"])).all()
    overflow = of_info(state)
    assert overflow > 0 if case.lost is None else overflow == pytest.approx(case.lost)
    assert of_info(run(filled(FITTING), state, ONES)[1]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CROWDED if c.keeps], ids=repr)
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


@pytest.mark.parametrize("case", [c for c in CROWDED if c.keeps], ids=repr)
def test_feedback_stays_bounded_under_any_overflow(case: Crowded) -> None:
    tx = case.make("nan")
    run = aggregator(tx, WORKERS, "vmap")
    for rows in (2 * FITTING, 4 * FITTING):
        too_much = filled(rows)
        given = np.linalg.norm(np.asarray(too_much["crowded"], np.float64).mean(axis=0))
        state, sent = initial(tx, too_much, "vmap"), np.zeros(80)
        for step in range(80):
            results, state = run(too_much, state, ONES)
            sent[step] = np.linalg.norm(flat(results)[0]) / given
        assert sent.max() < 30  # What is no contraction passes 1000 by then.
        assert 0.2 < sent[40:].mean() < 8


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


NOTHING_KEPT = {
    "nonzero": lambda: sparsifiers.nonzero(density=0.25, granularity="element"),
    "threshold": lambda: sparsifiers.threshold(1e-3, k=16),
    "nonzeros": lambda: quantizers.sparse_dither(levels=32767, norm="max", capacity=16),
}
CODECS = {
    "alone": lambda codec: codec,
    "blockwise": lambda codec: blockwise(codec, 64),
    "error_feedback_blockwise": lambda codec: feedback.error_feedback(blockwise(codec, 64)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        (name, wrap) if name == "threshold" else slow(name, wrap)
        for name in NOTHING_KEPT
        for wrap in CODECS
        if (name, wrap) != ("nonzeros", "error_feedback_blockwise")
    ],
)
def test_blockwise_codecs_report_overflow(name: str, wrap: str) -> None:
    """Two blocks of 64, of which the first has twice as many as fit."""
    tx = all_gather_mean(CODECS[wrap](NOTHING_KEPT[name]()), diagnostics=True)
    x = jnp.zeros((WORKERS, 128)).at[:, :32].set(1.0).at[:, 64:80].set(1.0)
    x = x if wrap != "alone" else x[:, :64]
    run, state = aggregator(tx, WORKERS, "checked"), initial(tx, x, "checked")
    results, state = run(x, state, ONES)
    assert of_info(state) == 16
    assert np.isnan(np.asarray(results)).all() != wrap.startswith("error_feedback")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["threshold", *map(slow, ("nonzero", "nonzeros"))])
def test_memoryless_codecs_can_be_inner_stages(name: str) -> None:
    tx = jaxcomm.hierarchical(
        all_gather_mean(NOTHING_KEPT[name](), diagnostics=True), jaxcomm.mean("dcn")
    )
    mesh = jax.make_mesh((2, 2), ("dcn", "data"), axis_types=(AxisType.Auto,) * 2)
    x = jnp.zeros((4, 64)).at[:, :16].set(1.0)

    def one(x: jax.Array) -> tuple[jax.Array, Any]:
        update, state = tx.update(x[0], tx.init(x[0]))
        update, state = tx.update(x[0], state)
        return update, state[0].diagnostics["overflow"]

    on_mesh = jax.jit(
        jax.shard_map(one, mesh=mesh, in_specs=P(("dcn", "data")), out_specs=(P(), P()))
    )
    update, overflow = on_mesh(x)
    np.testing.assert_allclose(update, x[0], rtol=1e-4)
    assert overflow == 0
    update, overflow = on_mesh(x.at[3].set(1.0))  # Of one worker of four.
    assert np.isnan(np.asarray(update)).all() and overflow == 48 / 4


ELEMENTS = {"density": 0.25, "granularity": "element"}
WITH_CAPACITY = {
    "nonzero": lambda: sparsifiers.nonzero(**ELEMENTS),
    "nonzero_union": lambda: sparsifiers.nonzero_union(**ELEMENTS),
    "threshold": lambda: sparsifiers.threshold(1e-3, k=16),
    "nonzeros": lambda: quantizers.sparse_dither(levels=127, norm="max", capacity=16),
    "s2_sketch": lambda: sketches.s2_sketch(sketch_ratio=1.5, **ELEMENTS),
    "s2_sketch_peel": lambda: sketches.s2_sketch(sketch_ratio=3, rows=3, decode="peel", **ELEMENTS),
    "s2_codes": lambda: sketches.s2_codes(sketch_ratio=3, **ELEMENTS),
    "blockwise": lambda: blockwise(sparsifiers.nonzero_union(**ELEMENTS), 64),
}
AGGREGATORS = {
    "gathered": lambda codec: all_gather_mean(codec, diagnostics=True),
    "gathered_agreed": lambda codec: all_gather_mean(
        codec, share_statistics=True, diagnostics=True
    ),
    "two_stage": lambda codec: jaxcomm.two_stage_mean(codec, diagnostics=True),
    "doubling": lambda codec: jaxcomm.recursive_doubling_mean(
        lambda added: codec, diagnostics=True
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "name"),
    [
        (way, name) if name == "nonzero_union" and way != "gathered_agreed" else slow(way, name)
        for way in AGGREGATORS
        for name in WITH_CAPACITY
    ],
)
def test_the_metric_reports_why_the_update_is_nan(way: str, name: str) -> None:
    size = 64 * WORKERS if way == "two_stage" else 64
    tx = AGGREGATORS[way](WITH_CAPACITY[name]())
    full = jnp.ones((WORKERS, size))
    few = jnp.zeros((WORKERS, size)).at[:, ::16].set(1.0)  # Which nearly all draws solve for.
    run, state = aggregator(tx, WORKERS, "checked"), initial(tx, full, "checked")
    assert "overflow" in state.diagnostics
    results, state = run(full, state, ONES)
    assert np.isnan(np.asarray(results)).all() and of_info(state) > 0
    results, state = run(few, state, ONES)
    assert np.isfinite(np.asarray(results)).all() and of_info(state) == 0


WRAPPERS = {
    "scaled": lambda codec: compression.scaled(codec),
    "local_clip": lambda codec: feedback.local_clip(codec, 100.0),
    "momentum": lambda codec: feedback.momentum(codec, 0.0),
    "momentum_correction": lambda codec: feedback.momentum_correction(codec, 0.0),
    "blockwise": lambda codec: blockwise(codec, 64),
    "rotated": rotated,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_wrap_both_forms(name: str) -> None:
    strict = sketches.s2_sketch(density=0.25, sketch_ratio=1.0, granularity="element")
    wrapped, x = WRAPPERS[name](strict), jnp.arange(1.0, 65.0)
    q, _ = send(wrapped, wrapped.init(x), x)
    assert np.isnan(q).all()
    q, _ = send(wrapped.drop_overflow, wrapped.init(x), x)
    expected, _ = send(WRAPPERS[name](strict.drop_overflow), wrapped.init(x), x)
    np.testing.assert_array_equal(q, expected)
    assert np.isfinite(q).all()
