"""S2 Reducer's codecs: moments, the union, peeling, and codes modulo 256."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm import Codec, s2_reducer
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sketches import s2_codes, s2_sketch
from jaxcomm.testing import _codec
from tests.codecs import draws, sent
from tests.steps import steps
from tests.workers import aggregator, initial

SIZE, NON_ZERO, DRAWS = 4000, 200, 300


def sparse(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = np.zeros(SIZE, np.float32)
    x[rng.choice(SIZE, NON_ZERO, replace=False)] = rng.normal(size=NON_ZERO)
    return x


def errors(codec: Codec, x: np.ndarray) -> np.ndarray:
    """Of every draw, [draws, size], over the norm of x."""
    return (draws(codec, x, DRAWS) - x) / np.linalg.norm(x)


def require_no_bias(error: np.ndarray) -> None:
    """Of 4000 means, none is off by 5 standard errors."""
    deviation = error.std(axis=0, ddof=1) / math.sqrt(DRAWS)
    assert (np.abs(error.mean(axis=0)) <= 5 * deviation + 1e-6).all()


build = functools.partial(s2_sketch, density=NON_ZERO / SIZE, granularity="element")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "ratio", "decode", "omega"),
    [
        (3, 2, "mean", 199 / (3 * math.ceil(400 / 3))),
        (3, 1, "median", 1.17),
        (5, 1, "median", 1.28),
    ],
)
def test_the_error_is_that_of_theory(rows: int, ratio: float, decode: Any, omega: float) -> None:
    """(K - 1)/c of the mean; of the median, what was simulated with ideal hashes."""
    codec = build(sketch_ratio=ratio, rows=rows, decode=decode)
    error = errors(codec, sparse())
    assert np.sum(error**2, axis=1).mean() == pytest.approx(omega, rel=0.1)
    require_no_bias(error)
    claim: Any = codec.claims.variance
    assert claim is None if decode == "median" else claim(SIZE, 8) == pytest.approx(omega)


@pytest.mark.slow
def test_an_even_number_of_rows_is_not_decoded_by_the_lower_of_the_middle_two() -> None:
    codec = build(density=1, sketch_ratio=0.5, rows=2, decode="median")
    error = errors(codec, np.ones(600, np.float32))
    deviation = error.mean(axis=1).std(ddof=1) / math.sqrt(DRAWS)
    assert abs(error.mean()) < 5 * deviation
    assert error.std() > 20 * deviation  # Two rows' lower one is off by 0.8 of it.


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"sketch_ratio": 1.0}, {"sketch_ratio": 1.5, "rows": 3, "decode": "peel"}]
)
def test_above_the_capacity_only_the_capacity_is_sent(options: dict[str, Any]) -> None:
    x = np.random.default_rng(3).normal(size=SIZE).astype(np.float32)
    codec = build(**options, overflow="drop")
    error = errors(codec, x)
    dropped = 1 - NON_ZERO / SIZE
    assert (np.isclose(error, -x / np.linalg.norm(x), atol=0).mean(axis=1) >= dropped).all()
    omega = 0 if "decode" in options else codec.claims.variance(SIZE, 1)
    expected = dropped + (1 - dropped) * omega
    assert np.sum(error**2, axis=1).mean() == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["row", 16])
def test_peeling_is_exact_and_rows_are_whole(granularity: Any) -> None:
    x = np.zeros((300, 8), np.float32)
    x[::17] = np.random.default_rng(0).standard_t(2, (18, 8))
    decoded = sent(
        s2_sketch(density=0.125, sketch_ratio=1.7, rows=3, granularity=granularity, decode="peel"),
        x,
    )
    np.testing.assert_allclose(decoded, x, atol=2.0**-21 * np.abs(x).max())
    union = np.repeat((x.reshape(-1, 16) != 0).any(axis=1), 16).reshape(x.shape)
    assert (decoded[~union] == 0).all()


@pytest.mark.slow
def test_unpeeled_coordinates_are_estimated_without_bias() -> None:
    codec = build(sketch_ratio=1.1, rows=3, decode="peel")
    error = errors(codec, sparse())
    assert 0.01 < np.sum(error**2, axis=1).mean() <= codec.claims.variance(SIZE, 1)
    require_no_bias(error)


def workers_with_rows_of_their_own(workers: int) -> np.ndarray:
    x = np.zeros((workers, 120, 4), np.float32)
    rng = np.random.default_rng(5)
    for worker in range(workers):
        x[worker, rng.choice(120, 6, replace=False)] = rng.normal(size=(6, 4))
    return x


@pytest.mark.slow
def test_the_mean_of_workers_with_other_rows() -> None:
    x = jnp.asarray(workers_with_rows_of_their_own(4))
    tx = s2_reducer(density=0.2, sketch_ratio=1.8, rows=3, decode="peel", diagnostics=True)
    results, state = aggregator(tx, 4, "checked")(x, initial(tx, x, "checked"), jnp.ones(4))
    mean = np.asarray(x).mean(axis=0, dtype=np.float64)
    np.testing.assert_allclose(results, np.broadcast_to(mean, x.shape), atol=1e-5)
    assert (np.asarray(results)[:, (mean == 0)] == 0).all()
    union = (mean != 0).any(axis=1).mean()
    assert float(state.diagnostics["union_density"]) == pytest.approx(union)
    assert float(state.diagnostics["unpeeled"]) == float(state.diagnostics["overflow"]) == 0


@pytest.mark.slow
def test_diagnostics_report_density_and_expected_error() -> None:
    x = workers_with_rows_of_their_own(4)
    tx = s2_reducer(density=0.05, sketch_ratio=1, overflow="drop", diagnostics=True)
    _, states = steps(tx, np.stack([x] * 30))
    reported = {name: np.asarray(values)[:, 0] for name, values in states.diagnostics.items()}
    kept = 6 / (x != 0).any(axis=(0, 2)).sum()  # The capacity is six, in as many times four cells.
    np.testing.assert_allclose(reported["overflow"], 1 - kept, rtol=1e-6)
    np.testing.assert_allclose(
        reported["expected_error"], 1 - kept + kept * (4 * 6 - 1) / 24, rtol=1e-6
    )
    assert reported["compression_error"].mean() == pytest.approx(
        reported["expected_error"][0], rel=0.2
    )
    assert "union_density" in reported


@pytest.mark.slow
def test_wrapping_cells_add_no_error() -> None:
    x = np.repeat(workers_with_rows_of_their_own(8).sum(axis=0, keepdims=True), 8, axis=0)
    x[:, :, 0] = np.where(x[:, :, 0] != 0, 9.0, 0)  # 120 of all workers, where two will wrap.
    codec = s2_codes(density=0.35, sketch_ratio=1.6)
    step = _codec.sent(codec, x, 1, 0)
    context, payload = jax.tree.map(lambda leaf: leaf[0, 0], (step.contexts, step.payloads))
    tables = np.asarray(step.payloads.table)[0]
    assert tables.dtype == np.int8
    total = np.sum(tables, axis=0, dtype=np.int64)
    wrapped = total.astype(np.int8)
    assert (wrapped != total).any()
    decoded = codec.decode(context.received(8), payload._replace(table=jnp.asarray(wrapped)))
    mean = x.mean(axis=0, dtype=np.float64)
    assert np.abs(np.asarray(decoded) - mean).max() <= np.abs(x).max() / 15
    assert (np.asarray(decoded)[mean == 0] == 0).all() and (np.asarray(decoded) != 0).any()


def test_mistakes() -> None:
    median = s2_sketch(density=0.5, sketch_ratio=2, rows=3, decode="median")
    with pytest.raises(ValueError, match="no bound is known"):  # It may diverge.
        sent(error_feedback(median), np.ones((10, 2)))
    for options, words in (
        ({"bits": 8}, "needs `decode`='peel'"),
        ({"scope": "tree", "granularity": "element"}, "statistic of a single array"),
        ({"scope": "bucket"}, "two axes or more"),
    ):
        with pytest.raises(ValueError, match=words):
            tx = s2_reducer(density=0.5, sketch_ratio=1.0, **options)
            steps(tx, jnp.ones((1, 2, 4, 3)))
