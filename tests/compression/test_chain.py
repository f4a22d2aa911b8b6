"""Chains of codecs: what is selected, in how many bits, with what bounds; and separate extremes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm import Codec, Context, Keys
from jaxcomm.compression import blockwise, chain, reserved, scaled
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import cast, dither
from jaxcomm.compression.sparsifiers import random_k, threshold, top_k, wangni
from tests.codecs import payload_of, sent
from tests.slow import slow

SIZE = 400


def normal(size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(0).normal(size=size).astype(np.float32)


def drawn(codec: Codec, size: int = SIZE) -> np.ndarray:
    """The coordinates that `random_k` draws, from what it makes of ones."""
    return np.flatnonzero(sent(codec, np.ones(size, np.float32)))


def largest(x: np.ndarray, among: np.ndarray, k: int) -> np.ndarray:
    return np.sort(among[np.argsort(-np.abs(x[among]))[:k]])


def payload_bytes(codec: Codec) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(payload_of(codec, (SIZE,))))


def test_top_k_of_random_k_in_8_bits() -> None:
    x, first = normal(), random_k(k=100)
    decoded = sent(chain(scaled(first), top_k(k=20), dither(bits=8)), x)
    expected = largest(x, drawn(first), 20)
    levels = np.abs(x[expected]).max() / 127
    assert {*np.flatnonzero(decoded)} <= {*expected} and np.count_nonzero(decoded) >= 18
    np.testing.assert_allclose(decoded[expected], x[expected], rtol=0, atol=levels * 1.001)
    # 20 of 100 in an Elias-Fano code of two low bits, 20 codes, one norm.
    assert payload_bytes(chain(first, top_k(k=20), dither(bits=8))) == 4 * 3 + 20 + 4
    assert math.log2(math.comb(100, 20)) < 20 * 2 + 20 + 99 // 4 < 3 * 32


def test_random_k_of_the_largest() -> None:
    x = normal()
    codec = chain(top_k(k=100), random_k(k=20))
    decoded = sent(codec, x)
    found = np.flatnonzero(decoded)
    assert len(found) == 20 and {*found} <= {*largest(x, np.arange(SIZE), 100)}
    np.testing.assert_allclose(decoded[found], 5 * x[found], rtol=1e-6)
    # The indices are those of 20 among all: four low bits, and 24 high ones.
    assert payload_bytes(codec) == 4 * math.ceil((20 * 4 + 20 + 399 // 16) / 32) + 4 * 20


@pytest.mark.parametrize(
    "first", [top_k(k=10, block_size=30), slow(top_k(k=100, sample_ratio=0.2))]
)
def test_top_k_of_top_k_is_top_k(first: Codec) -> None:
    x, codec = normal(), chain(first, top_k(k=7))
    among = np.flatnonzero(sent(first, x))
    expected = np.zeros(SIZE)
    expected[largest(x, among, 7)] = x[largest(x, among, 7)]
    np.testing.assert_array_equal(sent(codec, x), expected)


@pytest.mark.slow
def test_all_selections_draw_independently() -> None:
    x, first = np.ones(SIZE, np.float32), random_k(k=200)
    decoded = sent(chain(first, random_k(k=100)), x)
    found = np.flatnonzero(decoded)
    assert len(found) == 100 and {*found} <= {*drawn(first)} and np.all(decoded[found] == 4)
    # With the key of the first, the second would draw among the same first positions of it.
    positions = np.searchsorted(drawn(first), found)
    assert {*positions} != {*drawn(random_k(k=100), 200)}


@pytest.mark.slow
def test_more_capacity_than_coordinates() -> None:
    x = normal(5)
    for codec in chain(top_k(k=4, block_size=4), cast("float32")), chain(random_k(k=9), top_k(k=9)):
        np.testing.assert_array_equal(sent(codec, x), x)


OMEGA = min(20 / 127**2, 20**0.5 / 127)


@pytest.mark.parametrize(
    "codec, variance, contraction",
    [
        (chain(scaled(random_k(k=100)), top_k(k=20), dither(bits=8)), None, 0.05 * (1 - OMEGA)),
        (chain(random_k(k=100), random_k(k=20), dither(bits=8)), 20 * (1 + OMEGA) - 1, None),
        (chain(top_k(k=100), random_k(k=80)), None, 0.75 * 0.25),
        (chain(top_k(k=100), random_k(k=20)), None, 1 - 4.0),  # A variance of 4 is no contraction.
        (chain(top_k(k=100), scaled(random_k(k=20))), None, 0.05),
        (chain(random_k(k=100), top_k(k=20), dither(bits=8)), None, None),
        (reserved(dither(bits=8), top_k(k=100)), min(400 / 127**2, 20 / 127) * 0.75, None),
        (reserved(top_k(k=20), top_k(k=100)), None, 1 - 0.75 * 0.95),
        (reserved(dither(bits=8), threshold(1.0, k=100)), None, None),
    ],
)
def test_claims(codec: Codec, variance: float | None, contraction: float | None) -> None:
    stated = [
        claim and claim(SIZE, 1) for claim in (codec.claims.variance, codec.claims.contraction)
    ]
    for found, expected in zip(stated, (variance, contraction), strict=True):
        assert found is expected if expected is None else found == pytest.approx(expected)


@pytest.mark.slow
def test_a_bucket_in_place_of_the_extreme() -> None:
    x = normal(256)
    x[[3, 100]] = 1e4, -1e5
    codec = reserved(blockwise(dither(bits=4), 64), top_k(k=2, block_size=64))
    decoded = sent(codec, x).reshape(4, 64)
    for row, given in zip(decoded, x.reshape(4, 64), strict=True):
        extremes = np.argsort(-np.abs(given))[:2]
        np.testing.assert_array_equal(row[extremes], given[extremes])
        step = np.sort(np.abs(given))[-3] / 7
        assert np.abs(row - given).max() <= step * 1.001
        levels = np.delete(row / step, extremes)
        np.testing.assert_allclose(levels, np.round(levels), atol=1e-4)


def test_invalid_chains_are_refused() -> None:
    x, feedback = jnp.zeros(8), error_feedback(top_k(k=1))
    with pytest.raises(ValueError, match=r"Codec 1 of 2 .* must select"):
        chain(dither(), top_k(k=1))
    with pytest.raises(ValueError, match="Codec 2 of 3"):
        chain(top_k(k=2), wangni(k=1), dither())
    with pytest.raises(ValueError, match=r"Codec 1 of 2 .* in float32"):
        chain(top_k(k=2, value_dtype="bfloat16"), dither())
    with pytest.raises(ValueError, match=r"error_feedback\(chain"):
        chain(top_k(k=4), feedback).init(x)
    for pair in (feedback, top_k(k=1)), (dither(), feedback):
        with pytest.raises(ValueError, match=r"error_feedback\(reserved"):
            reserved(*pair).init(x)


def test_statistics_of_several_buckets() -> None:
    codec, x = chain(random_k(k=4), dither()), jnp.zeros(8)
    context = Context(Keys(*jax.random.split(jax.random.key(0))), shape=(8,), statistics_size=24)
    with pytest.raises(ValueError, match="among buckets: use `scope`='bucket'"):
        codec.measure(context, x)
