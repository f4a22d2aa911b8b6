"""Rotations: orthogonal, equal on all workers, and what they spare a spiky vector."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm import Codec, Context, Keys
from jaxcomm.compression import blockwise, rotated
from jaxcomm.compression._transforms import hadamard
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither, min_max_dither
from jaxcomm.compression.sparsifiers import top_k
from jaxcomm.testing._codec import require_sums
from tests.codecs import draws
from tests.slow import slow

KEYS = Keys(jax.random.key(0), jax.random.key(1))


class Whole(NamedTuple):
    words: jax.Array


LOSSLESS = Codec(
    encode=lambda context, x: (Whole(x), context.memory),
    decode=lambda context, payload: payload.words / context.count,
)
"""Sends what it is given, so that the payload is the rotated array."""


def matrix(size: int) -> np.ndarray:
    """Hadamard's matrix of a power of two by its recursion, orthonormal."""
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]]) / 2**0.5
    return h


@pytest.mark.parametrize("size", [256, *map(slow, [1, 2, 4, 8, 128])])
def test_the_transform_against_its_matrix(size: int) -> None:
    x = np.random.default_rng(size).normal(size=size)
    result = hadamard(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(result, matrix(size) @ x, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "scale"),
    [((7, 5), 1e-30), slow((), 1.0), slow((0,), 1.0), slow((64,), 1.0), slow((65,), 1e37)],
    ids=str,
)
def test_lengths_are_kept_and_the_inverse_is_exact(shape: tuple[int, ...], scale: float) -> None:
    codec = rotated(LOSSLESS)
    x = np.random.default_rng(1).normal(size=shape) * scale
    given = jnp.asarray(x, jnp.float32)
    context = Context(KEYS, shape=shape)
    payload, _ = codec.encode(context, given)
    (words,) = payload
    assert words.shape == (2 ** int(np.ceil(np.log2(max(x.size, 1)))),)
    length = np.linalg.norm(np.asarray(words, np.float64))
    np.testing.assert_allclose(length, np.linalg.norm(x), rtol=1e-5)
    result = codec.decode(context.received(), payload)
    np.testing.assert_allclose(result, x, atol=1e-5 * scale)
    # One more rotation, by signs of its own.
    (twice,) = rotated(codec).encode(context, given)[0]
    assert x.size <= 1 or np.abs(twice - words).max() > 0.1 * scale


def test_rotations_are_equal_on_workers_and_differ_by_step() -> None:
    codec, x = rotated(LOSSLESS), jnp.linspace(-1, 1, 64)
    keys = jax.random.split(jax.random.key(5), 3)
    first, same_shared, other_shared = (
        np.asarray(codec.encode(Context(Keys(shared, private), shape=x.shape), x)[0].words)
        for shared, private in [(keys[0], keys[1]), (keys[0], keys[2]), (keys[1], keys[2])]
    )
    np.testing.assert_array_equal(first, same_shared)
    assert np.abs(first - other_shared).max() > 0.1


def test_the_inner_codec_draws_independently() -> None:
    seen = []
    inner = LOSSLESS.replace(
        measure=lambda context, x: seen.append(jax.random.key_data(context.keys.shared)) or ()
    )
    x = jnp.ones(4)
    for codec in (inner, rotated(inner), rotated(rotated(inner))):
        codec.measure(Context(KEYS, shape=x.shape), x)
    assert len({tuple(map(int, key)) for key in seen}) == 3


@pytest.mark.slow
def test_a_spiky_vector() -> None:
    # Two opposite spikes set the levels, and all else lies halfway between two of them: with k
    # levels the squared error is 1022 / (k - 1)**2 exactly, where |x|**2 is 2.
    x = np.zeros(1024)
    x[[7, 600]] = 1, -1
    plain, turned = (
        np.mean(np.sum((draws(codec, x, 200) - x) ** 2, axis=1)) / 2
        for codec in (min_max_dither(levels=16), rotated(min_max_dither(levels=16)))
    )
    np.testing.assert_allclose(plain, 511 / 15**2, rtol=1e-4)
    assert plain / 512 < turned <= (2 * np.log(1024) + 2) / 15**2


@pytest.mark.parametrize(
    "codec", [rotated(dither(levels=7)), slow(blockwise(rotated(dither(levels=7)), 8))]
)
def test_sums_decode_to_sums(codec: Codec) -> None:
    require_sums(codec, workers=3, size=21)


def test_bounds_are_those_at_the_power_of_two() -> None:
    unbiased, biased = min_max_dither(levels=5), top_k(k=1)
    assert rotated(unbiased).claims.variance(33, 3) == unbiased.claims.variance(64, 3)
    assert rotated(biased).claims.contraction(33, 1) == 1 / 64
    assert rotated(unbiased).claims.contraction is rotated(biased).claims.variance is None
    with pytest.raises(ValueError, match=r"`error_feedback\(rotated\(...\)\)`"):
        rotated(error_feedback(biased)).init(jnp.ones(3))
