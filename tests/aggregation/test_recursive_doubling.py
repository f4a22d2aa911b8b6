"""Recursive doubling of sparse sums: any number of workers, too small a capacity, mistakes."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm import sparcml
from jaxcomm.compression.quantizers import dither
from tests.aggregation.runs import refuse, sent
from tests.aggregation.test_memory import remainders
from tests.workers import aggregate, draws

ROWS, WIDTH = 24, 3


def sparse_rows(workers: int, each: int, seed: int = 0) -> np.ndarray:
    """Small integers, which add exactly, in a few rows of each worker."""
    rng, given = np.random.default_rng(seed), np.zeros((workers, ROWS, WIDTH), np.float32)
    for one in given:
        one[rng.choice(ROWS, each, replace=False)] = rng.integers(1, 9, (each, WIDTH))
    return given


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 6, 7, 8])
def test_sums_that_fit_are_exact_for_any_number_of_workers(workers: int) -> None:
    given = sparse_rows(workers, 2)
    results = aggregate(sparcml(density=2 / ROWS), given)
    np.testing.assert_allclose(results, np.tile(given.mean(axis=0), (workers, 1, 1)), rtol=1e-6)


@pytest.mark.slow
def test_rows_admitted_by_rounding_up_are_sent_later_too() -> None:
    """Two rows of each of two workers fit at first; of their union, three fit."""
    given = jnp.zeros((2, 10, 1)).at[0, :2].set(1.0).at[1, 5:7].set(1.0)
    sent = draws(sparcml(density=0.15), given, 20)
    # Of 20 times 4 halves, what is still kept at the end is of a step or two.
    assert 36 <= sent.sum() <= 40


def test_payloads_grow_with_the_sum() -> None:
    account = sent(sparcml(density=0.01), jnp.zeros((8, 4096, 8)))
    rounds = [c.bytes_per_worker for c in account.collectives if c.kind == "ppermute"]
    rows = [41, 82, 164]  # One, two and four hundredths, rounded up.
    for bytes_sent, count in zip(rounds, rows, strict=True):
        # With an index of at most 2 + log2(4097 / count) bits, in whole words.
        assert 32 * count < bytes_sent <= 32 * count + count * 9 / 8 + 8
    (last,) = [c.bytes_per_worker for c in account.collectives if "gather" in c.kind]
    assert 32 * 328 * 7 / 8 < last < 1.05 * 32 * 328 * 7 / 8


def test_unsupported_memory_is_refused() -> None:
    tx = jaxcomm.recursive_doubling_mean(lambda added: remainders())
    message = "takes codecs whose memory is each worker's own"
    refuse(message, lambda: jaxcomm.init(tx, jnp.zeros(3), 2))


@pytest.mark.slow
def test_workers_with_the_same_sum_draw_equally() -> None:
    """Else partners would add different numbers, and replicas would diverge."""
    given = np.random.default_rng(0).normal(size=(6, 40)).astype(np.float32)
    tx = jaxcomm.recursive_doubling_mean(lambda added: dither(levels=127))
    results = aggregate(tx, jnp.asarray(given))
    assert (results == results[0]).all()
    error = np.abs(results[0] - given.mean(axis=0))
    # Of four roundings, each by a step at most, of sums that grow.
    assert 0 < error.max() < 4 * np.abs(given).max() / 127 * 2
