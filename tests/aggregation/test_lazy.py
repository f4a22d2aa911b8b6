"""Lazy uploads: who uploads, that the aggregate is the mean of last uploads, and what is sent."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm import Claims, Codec
from jaxcomm.compression import blockwise, scaled
from jaxcomm.compression.feedback import ef21, error_feedback
from jaxcomm.compression.quantizers import dither, signs
from jaxcomm.compression.sparsifiers import top_k
from tests.aggregation.runs import last, refuse, sent, steps
from tests.slow import slow
from tests.workers import Mode

WORKERS, SIZE, RATE = 4, 6, 0.1
BITS = 3


class GridPayload(NamedTuple):
    """LAQ's codes and their radius."""

    codes: jax.Array  # uint8[shape]
    radius: jax.Array  # float32[]


def grid() -> Codec:
    """LAQ's quantizer: to the nearest of 2^b points between -R and R, with R the largest size."""
    steps = 2**BITS - 1

    def encode(context: Any, x: jax.Array) -> Any:
        radius = jnp.max(jnp.abs(x))
        safe = jnp.where(radius > 0, radius, 1)
        codes = jnp.floor((x + safe) * (steps / 2) / safe + 0.5).astype(jnp.uint8)
        return GridPayload(codes, radius), context.memory

    def decode(context: Any, payload: GridPayload) -> jax.Array:
        return payload.radius * (payload.codes.astype(jnp.float32) * (2 / steps) - 1)

    # |error| is at most R / 7 in each of 6 coordinates, and R is at most the norm.
    return Codec(encode=encode, decode=decode, claims=Claims(contraction=lambda d, n: 1 - d / 49))


def on_grid(x: np.ndarray) -> np.ndarray:
    """The same of each row by Sun et al.'s formula, in NumPy."""
    tau, radius = 1 / (2**BITS - 1), np.abs(x).max(axis=1, keepdims=True)
    codes = np.floor((x + radius) / (2 * tau * np.where(radius > 0, radius, 1)) + 0.5)
    assert codes.min() >= 0 and codes.max() <= 2**BITS - 1
    return np.asarray(2 * tau * radius * codes - radius)


def by_hand(
    steps: int, quantize: Callable[[np.ndarray], np.ndarray], xi: float, depth: int, most: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The papers' algorithm with their thresholds on parameters, of quadratics.

    In each step the gradients and the last uploads [workers, size], and who uploads.
    """
    rng, shape = np.random.default_rng(0), (WORKERS, SIZE)
    curvatures = np.array([0.2, 0.5, 1.0, 4.0])[:, None] * rng.uniform(0.5, 1, shape)
    minima, uploads = rng.normal(size=shape), np.zeros(shape)
    history = [np.zeros(SIZE)] * (depth + 1)
    errors, clocks = np.zeros(WORKERS), np.zeros(WORKERS)
    for _ in range(steps):
        moved = sum(np.sum((new - old) ** 2) for new, old in itertools.pairwise(history))
        gradients = curvatures * (history[0] - minima)
        innovation = gradients - uploads
        sent = quantize(innovation)
        error = np.sum((innovation - sent) ** 2, axis=1)
        bound = xi / depth * moved / RATE**2 + 3 * (error + errors)
        who = (np.sum(sent**2, axis=1) >= bound) | (clocks >= most)
        uploads = uploads + who[:, None] * sent
        errors, clocks = np.where(who, error, errors), np.where(who, 0, clocks + 1)
        history = [history[0] - RATE * uploads.mean(axis=0), *history[:-1]]
        yield gradients, uploads, who


@pytest.mark.parametrize("mode", ["vmap", slow("checked"), slow("unchecked")])
@pytest.mark.parametrize("method", ["LAG-WK", "LAQ"])
def test_matches_the_algorithm_of_the_paper(method: str, mode: Mode) -> None:
    """With thresholds on the parameters there, and on the aggregates here."""
    codec, quantize = (None, lambda x: x) if method == "LAG-WK" else (grid(), on_grid)
    tx = jaxcomm.lazy(codec, threshold=0.8, memory=5, max_skip=7, diagnostics=True)
    given, uploads, who = map(np.array, zip(*by_hand(40, quantize, 0.8, 5, 7), strict=True))
    found = steps(tx, given, mode)
    for (results, state), of_step, uploading in zip(found, uploads, who, strict=True):
        expected = np.tile(of_step.mean(axis=0), (WORKERS, 1))
        np.testing.assert_allclose(results, expected, rtol=0, atol=2e-6)
        np.testing.assert_allclose(state.diagnostics["uploads"], uploading.mean(), rtol=1e-6)
    assert who[0].all() and 0.05 < who.mean() < 0.7
    assert not who.any(axis=1).all()  # In some steps all skip.


def held_by(state: Any) -> tuple[np.ndarray, np.ndarray]:
    """The last uploads of the workers, and the aggregate."""
    (own,), (shared,) = state.own.per_worker["data"], state.shared
    return np.asarray(own.last.total, np.float64), np.asarray(shared.mean.total, np.float64)


def normal(steps: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(steps, WORKERS, SIZE)).astype(np.float32)


def test_the_aggregate_is_the_mean_of_the_last_uploads_exactly() -> None:
    """Of integers, whose sums and means are exact; after a NaN and for other workers too."""
    rng = np.random.default_rng(1)
    tx = jaxcomm.lazy(threshold=0.5, memory=3, diagnostics=True)
    center, of_step = rng.integers(-64, 64, (WORKERS, SIZE)), (20, WORKERS, 1)
    given = center + rng.integers(-48, 48, of_step) * rng.integers(0, 2, of_step)
    given = given.astype(np.float32)
    given[10, 2, 3] = np.nan
    rates, before = [], (np.zeros(()), np.zeros(()))
    for number, (results, state) in enumerate(steps(tx, given)):
        uploads, aggregate = held_by(state)
        if number == 10:
            assert np.isnan(results).all()
            np.testing.assert_array_equal(uploads, before[0])
        else:
            np.testing.assert_array_equal(results, np.tile(aggregate, (WORKERS, 1)))
            rates.append(float(state.diagnostics["uploads"]))
        np.testing.assert_array_equal(uploads.mean(axis=0), aggregate)
        before = uploads, aggregate
    assert len({*rates}) > 2
    for workers in (3, 8):
        resized, _ = jaxcomm.resize_workers(tx, state, jnp.zeros(SIZE), workers)
        uploads, same = held_by(resized)
        np.testing.assert_array_equal(same, aggregate)
        np.testing.assert_array_equal(uploads, np.tile(aggregate, (workers, 1)))


@pytest.mark.parametrize("combine", [slow("sum"), None])
def test_a_threshold_of_0_equals_ef21(combine: Any) -> None:
    """Whose workers send the difference to their estimate in each step."""
    codec = blockwise(dither(bits=8), 2).replace(combine=combine)
    mean = jaxcomm.all_reduce_mean if combine else jaxcomm.all_gather_mean
    lazy, other = jaxcomm.lazy(codec, threshold=0.0), mean(ef21(codec))
    found, expected = ([x for x, _ in steps(tx, normal(4))] for tx in (lazy, other))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_the_number_of_skipped_steps_is_bounded() -> None:
    tx = jaxcomm.lazy(threshold=1e6, memory=1, max_skip=3, diagnostics=True)
    given = normal(9)
    found = [*steps(tx, given)]
    rates = [state.diagnostics["uploads"] for _, state in found]
    assert rates == [1, 0, 0, 0, 1, 0, 0, 0, 1]
    np.testing.assert_allclose(found[-1][0][0], given[8].mean(axis=0), rtol=0, atol=1e-6)


def test_bytes_decrease_only_if_all_workers_skip() -> None:
    """What is sent outside of the conditional are two flags; a branch is without collectives."""
    account = sent(jaxcomm.lazy(), jnp.zeros((WORKERS, 1000)))
    always = [c for c in account.collectives if not any("cond" in part for part in c.path)]
    assert sum(c.bytes_per_worker for c in always) == 2 * 3 / 4 * 8
    assert account.bytes_per_worker == 2 * 3 / 4 * (4000 + 8)
    assert {part for c in account.collectives for part in c.path if "cond" in part} == {"cond 2/2"}
    assert account.amortized_bytes_per_worker(0.25) == 2 * 3 / 4 * (1000 + 8)


def traced(codec: Codec, workers: int, threshold: float = 1.0) -> None:
    """Traces a step of 1,000 coordinates."""
    sent(jaxcomm.lazy(codec, threshold=threshold), jnp.zeros((workers, 1000)), "vmap")


@pytest.mark.parametrize("workers", [2, 128])
def test_the_codec_of_the_docstring_is_accepted(workers: int) -> None:
    assert "blockwise(dither(bits=16), 64)" in str(jaxcomm.lazy.__doc__)
    traced(blockwise(dither(bits=16), 64), workers)


@pytest.mark.parametrize(
    ("codec", "found"),
    [
        (blockwise(dither(bits=8), 256), r"1\.03 for 1000 coordinates"),
        (scaled(dither(levels=1)), ".* for"),
        (top_k(ratio=0.1), r"0\.9 for"),
        (signs(), "unknown"),
    ],
)
def test_codecs_that_could_prevent_all_uploads_are_refused(codec: Codec, found: str) -> None:
    """For 100 steps, updates were 0."""
    refuse(f"`lazy` needs .* of at most 1/4.*it is {found}", lambda: traced(codec, 4))
    traced(blockwise(dither(bits=8), 64), 4, threshold=0.0)  # Then each step uploads.


def test_inner_memory_is_refused() -> None:
    codec = error_feedback(top_k(k=1))
    refuse("`lazy` takes a codec without memory", lambda: traced(codec, 2))


def test_all_upload_in_the_first_step() -> None:
    """A worker whose gradient is small beside those of others does, too: no rule holds yet."""
    tx = jaxcomm.lazy(blockwise(dither(bits=16), 64), threshold=1e6, diagnostics=True)
    given = np.random.default_rng(0).normal(size=(4, 64)) * [[1], [1e-3], [1e-6], [0]]
    results, state = last(tx, [given])
    assert state.diagnostics["uploads"] == 1
    np.testing.assert_allclose(results[0], given.mean(axis=0), rtol=0, atol=1e-3)


def test_upload_errors_refer_to_the_uploads() -> None:
    """With summed payloads, worker 1 rounds with the norm of worker 0: 3.8e-3, not 9.5e-9."""
    given = np.array([[3.0, -1.0, 2.0, 0.5], [1e-3, 2e-3, -1e-3, 5e-4]])
    _, state = last(jaxcomm.lazy(dither(bits=8)), [given])
    (own,) = state.own.per_worker["data"]
    errors = np.mean((given - np.asarray(own.last.total)) ** 2, axis=1)
    np.testing.assert_allclose(own.error, errors, rtol=1e-5)
    assert errors[1] > 1e-7  # Its own norm is 2e-3, of which a level is 3e-5.
