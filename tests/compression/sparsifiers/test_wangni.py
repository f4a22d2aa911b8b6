"""Wangni: probabilities by the paper's formula, drawn exactly as often, and never too many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm import Keys
from jaxcomm.compression import _systematic
from jaxcomm.compression.sparsifiers import _random_k, wangni
from tests.cases._sampled import wangni_probabilities
from tests.codecs import context_of, sent
from tests.slow import slow


def heavy(size: int) -> np.ndarray:
    return np.random.default_rng(size).standard_t(1.5, size=size).astype(np.float32)


@pytest.mark.parametrize(("k", "size"), [(5, 64), slow(1, 7), slow(100, 10000), slow(3000, 10000)])
def test_probabilities_are_those_of_the_paper(k: int, size: int) -> None:
    x = heavy(size)
    codes = np.asarray(_random_k._codes(jnp.asarray(x), k), np.float64)
    one = 2.0 ** _systematic.digits(k)
    expected = wangni_probabilities(x.astype(np.float64), k)
    np.testing.assert_allclose(codes / one, expected, rtol=1e-5, atol=1 / one)
    assert codes.sum() <= k * one and codes.max() <= one and np.all(codes[x != 0] > 0)


def test_sums_of_probabilities_cannot_wrap() -> None:
    for k in (1, 2**7, 2**20, 2**26, 2**28):
        one = 2 ** _systematic.digits(k)
        assert one >= 8 and 2**30 < k * one <= 2**31
    assert 2**31 + _random_k.MOST_COORDINATES < 2**32


def test_draw_frequencies_match_the_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    # In sixteenths, adding up to three: all sixteen offsets together are the expectation, exactly.
    codes = jnp.asarray([3, 16, 0, 5, 1, 7, 16, 0], jnp.uint32)
    monkeypatch.setattr(_systematic, "digits", lambda count: 4)
    monkeypatch.setattr(_systematic._noise, "bits", lambda offset, shape: offset[None] << 28)
    drawn = jax.vmap(lambda offset: _systematic.draw(codes, 3, offset))(
        jnp.arange(16, dtype="uint32")
    )
    np.testing.assert_array_equal(np.bincount(np.asarray(drawn).ravel(), minlength=8), codes)
    assert np.all(np.diff(np.asarray(drawn, np.int64), axis=1) > 0)


def test_keeping_everything_is_the_identity() -> None:
    x = heavy(33)
    x[5] = 0
    for codec in (wangni(ratio=1.0), wangni(k=100)):
        np.testing.assert_array_equal(sent(codec, x), x)
        assert codec.claims.variance(33, 1) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("k", "size"), [(1, 2**24 + 2**10), (3, 2**26)])
def test_far_more_coordinates_than_are_sent(k: int, size: int) -> None:
    codec, key = wangni(k=k), jax.random.key(0)

    @jax.jit
    def total(x: jax.Array) -> jax.Array:
        context = context_of(codec, x, Keys(key, key))
        payload, _ = codec.encode(context, x)
        return jnp.sum(codec.decode(context.received(), payload))

    # Of equal coordinates, what is sent adds up to all there is, whichever are drawn.
    assert float(total(jnp.ones(size))) == pytest.approx(size, rel=0.15)


def test_every_coordinate_has_a_share_of_the_capacity() -> None:
    for k in (1, 2, 100, 2**20):
        for size in (2**24 - 2**10, 2**24 + 2**10, 2**26, 2**28):
            total = k * 2 ** _systematic.digits(k)
            assert size < total * (1 - _systematic.SLACK) and total <= 2**31
            # The bound for equal coordinates is d / k - 1; rounding costs a third at the most.
            assert size / k - 1 <= wangni(k=k).claims.variance(size, 1) < 1.4 * size / k
