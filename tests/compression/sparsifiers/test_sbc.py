"""Binary: of one sign, as one mean; indices a little longer than Golomb's, and never longer."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm import Codec, Context
from jaxcomm.compression.sparsifiers import sbc


def sent(codec: Codec, x: np.ndarray) -> np.ndarray:
    @jax.jit
    def once(x: jax.Array) -> jax.Array:
        payload, _ = codec.encode(Context.of(x), x)
        return codec.decode(Context.of(x).received(), payload)

    return np.asarray(once(jnp.asarray(x, jnp.float32)), np.float64)


@pytest.mark.parametrize("flip", [1, -1])
def test_the_larger_mean_wins(flip: int) -> None:
    # Means of the three largest: 4 above, 3 below; the largest of all is below.
    x = flip * np.array([4.0, -7.0, 5.0, -1.0, 3.0, 0.5, -1.0, -0.2])
    expected = flip * np.array([4.0, 0, 4.0, 0, 4.0, 0, 0, 0])
    np.testing.assert_allclose(sent(sbc(k=3), x), expected, rtol=1e-6)


def test_places_left_over_decode_to_nothing() -> None:
    # Two of four places are taken; zeros, and coordinates of the other sign, are not sent.
    x = np.array([0.0, 5.0, 0.0, -1.0, 3.0, 0.0, -1.0])
    np.testing.assert_allclose(sent(sbc(k=4), x), [0, 4, 0, 0, 4, 0, 0], rtol=1e-6)


def test_a_lone_coordinate_counts_for_one_of_its_places() -> None:
    # The mean of what is there is larger above; over all places, below.
    x = np.array([1.0, -0.9, -0.9, -0.9])
    np.testing.assert_allclose(sent(sbc(k=3), x), [0, -0.9, -0.9, -0.9], rtol=1e-6)


@pytest.mark.parametrize("x", [np.zeros(9), np.zeros(0), np.zeros((2, 0)), np.float64(-3.0)])
def test_zeros_empties_and_scalars(x: np.ndarray) -> None:
    np.testing.assert_array_equal(sent(sbc(ratio=0.3), x), x)


@pytest.mark.parametrize("scale", [1e-37, 3e37])
def test_means_neither_vanish_nor_overflow(scale: float) -> None:
    x = np.array([-3.0, 1.0, -3.0, -3.0]) * scale
    np.testing.assert_allclose(sent(sbc(k=3), x), np.minimum(x, 0), rtol=1e-6)


def test_what_is_sent_is_orthogonal_to_what_is_left() -> None:
    x = np.random.default_rng(1).standard_t(2, size=500)
    result = sent(sbc(ratio=0.05), x)
    assert len(np.unique(result[result != 0])) == 1 and np.sum(result != 0) == 25
    assert abs(np.sum((x - result) * result)) < 1e-4 * np.sum(result**2)


def test_the_bound_holds_where_it_is_nearly_attained() -> None:
    # Of both signs: one alone; or as many equal ones as there can be.
    for x, k in ((np.array([1.0, -1.0]), 1), (np.eye(1, 50)[0] - np.eye(1, 50, 1)[0], 7)):
        left = np.sum((x - sent(sbc(k=k), x)) ** 2) / np.sum(x**2)
        assert 1 - left >= sbc(k=k).claims.contraction(x.size, 1) * (1 - 1e-6)
    assert sbc(k=1).claims.contraction(2, 1) == 1 / 2
    equal = np.tile([1.0, -1.0], 50)
    left = np.sum((equal - sent(sbc(k=5), equal)) ** 2) / 100
    np.testing.assert_allclose(1 - left, 5 / 100, rtol=1e-6)
    np.testing.assert_allclose(sbc(k=5).claims.contraction(100, 1), 1 / (5 + 99 / 5))


@pytest.mark.parametrize(("part", "golomb"), [(0.01, 8.11), (0.001, 11.49)])
def test_indices_are_half_a_bit_longer_than_golombs(part: float, golomb: float) -> None:
    # The paper's mean bits a position: b* + 1 / (1 - (1 - p)^(2^b*)).
    ratio = (math.sqrt(5) - 1) / 2
    b = 1 + math.floor(math.log2(math.log(ratio) / math.log(1 - part)))
    mean_bits = b + 1 / (1 - (1 - part) ** (2**b))
    np.testing.assert_allclose(mean_bits, golomb, atol=0.01)
    size = 10**6
    x = jax.ShapeDtypeStruct((size,), jnp.float32)
    codec = sbc(ratio=part)
    payload = jax.eval_shape(lambda x: codec.encode(Context.of(x), x)[0], x)
    ours = 32 * payload.indices.size / (part * size)
    assert mean_bits < ours < mean_bits + 0.5
    assert payload.mean.shape == ()
