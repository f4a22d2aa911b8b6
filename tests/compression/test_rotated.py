"""Rotations: orthogonal, drawn alike by all workers, and what they spare a spiky vector."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm import Codec, Coins, Context
from jaxcomm.compression import blockwise, rotated
from jaxcomm.compression._transforms import hadamard
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither, exponential_dither, min_max_dither
from jaxcomm.compression.sparsifiers import top_k
from tests.codecs import context_of
from tests.slow import slow
from tests.workers import aggregate

COINS = Coins(jax.random.key(0), jax.random.key(1))


class Whole(NamedTuple):
    words: jax.Array


def lossless() -> Codec:
    """Sends what it is given, so that the payload is the rotated array."""
    return Codec(
        encode=lambda context, x: (Whole(x), context.memory),
        decode=lambda context, payload: payload.words / context.count,
    )


def matrix(size: int) -> np.ndarray:
    """Hadamard's matrix of a power of two by its recursion, orthonormal."""
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]]) / 2**0.5
    return h


@pytest.mark.parametrize("size", [1, 2, 4, 8, 128, 256])
def test_the_transform_against_its_matrix(size: int) -> None:
    x = np.random.default_rng(size).normal(size=size)
    result = hadamard(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(result, matrix(size) @ x, atol=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("shape", "scale"),
    [((), 1.0), ((0,), 1.0), ((64,), 1.0), ((65,), 1e37), ((7, 5), 1e-30), ((2, 0), 1.0)],
    ids=str,
)
def test_lengths_stay_and_the_way_back_is_exact(shape: tuple[int, ...], scale: float) -> None:
    codec = rotated(lossless())
    x = np.random.default_rng(1).normal(size=shape) * scale
    given = jnp.asarray(x, jnp.float32)
    context = Context(COINS, shape=shape)
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


def test_workers_turn_alike_and_steps_apart() -> None:
    codec, x = rotated(lossless()), jnp.linspace(-1, 1, 64)
    keys = jax.random.split(jax.random.key(5), 3)
    first, alike, apart = (
        np.asarray(codec.encode(Context(Coins(public, private), shape=x.shape), x)[0].words)
        for public, private in [(keys[0], keys[1]), (keys[0], keys[2]), (keys[1], keys[2])]
    )
    np.testing.assert_array_equal(first, alike)
    assert np.abs(first - apart).max() > 0.1


def test_the_codec_inside_draws_apart() -> None:
    seen = []
    inner = lossless().replace(
        measure=lambda context, x: seen.append(jax.random.key_data(context.coins.public)) or ()
    )
    x = jnp.ones(4)
    for codec in (inner, rotated(inner), rotated(rotated(inner))):
        codec.measure(Context(COINS, shape=x.shape), x)
    assert len({tuple(map(int, key)) for key in seen}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("levels", [slow(2), 16])
def test_a_spiky_vector(levels: int) -> None:
    # Two opposite spikes set the levels, and all else lies halfway between two of them: with k
    # levels the squared error is 1022 / (k - 1)**2 exactly, where |x|**2 is 2.
    x = jnp.zeros(1024).at[jnp.array([7, 600])].set(jnp.array([1.0, -1.0]))
    plain = min_max_dither(levels=levels)
    errors = {}
    for name, codec in {"plain": plain, "rotated": rotated(plain)}.items():

        def once(key: jax.Array, codec: Codec = codec) -> jax.Array:
            context = context_of(codec, x, Coins(*jax.random.split(key)))
            payload, _ = codec.encode(context, x)
            return codec.decode(context.received(), payload) - x

        lost = jax.jit(jax.vmap(once))(jax.random.split(jax.random.key(2), 200))
        errors[name] = np.mean(np.sum(np.asarray(lost, np.float64) ** 2, axis=1)) / 2
    np.testing.assert_allclose(errors["plain"], 511 / (levels - 1) ** 2, rtol=1e-4)
    assert errors["rotated"] <= (2 * np.log(1024) + 2) / (levels - 1) ** 2
    assert errors["rotated"] > errors["plain"] / 512


@pytest.mark.quick(1)
@pytest.mark.parametrize("blocks", [False, True])
def test_sums_decode_to_sums(blocks: bool) -> None:
    workers, size = 3, 21
    codec = rotated(dither(levels=7))
    codec = blockwise(codec, 8) if blocks else codec
    xs = jnp.asarray(np.random.default_rng(3).normal(size=(workers, size)), jnp.float32)
    context = Context(COINS, codec.init(xs[0]), workers=workers, shape=(size,))

    @jax.jit
    def both(xs: jax.Array) -> tuple[jax.Array, jax.Array]:
        coins = Coins(COINS.public, jax.random.split(COINS.private, workers))
        alike = Coins(None, 0)
        on_worker = lambda coins, x: codec.measure(context.replace(coins=coins), x)  # noqa: E731
        measured = jax.vmap(on_worker, (alike, 0))(coins, xs)
        known = context.replace(statistics=jax.tree.map(lambda own: jnp.max(own, axis=0), measured))
        encode = lambda coins, x: codec.encode(known.replace(coins=coins), x)[0]  # noqa: E731
        payloads = jax.vmap(encode, (alike, 0))(coins, xs)
        decode = lambda payload, count: codec.decode(known.received(count), payload)  # noqa: E731
        total = jax.tree.map(lambda p: jnp.sum(p, axis=0, dtype=p.dtype), payloads)
        return decode(total, workers), jax.vmap(lambda p: decode(p, 1))(payloads)

    together, own = both(xs)
    np.testing.assert_allclose(together, np.mean(own, axis=0), atol=1e-5)
    assert 0.01 < np.abs(np.mean(own, axis=0) - np.mean(xs, axis=0)).max() < 1


def test_payloads_that_are_merged() -> None:
    given = np.random.default_rng(4).normal(size=(4, 500)).astype(np.float32)
    tx = jaxcomm.merged_mean(rotated(exponential_dither()))
    mean = given.mean(axis=0)
    lost = np.sum((aggregate(tx, jnp.asarray(given))[0] - mean) ** 2)
    # theta / n of all squares, with theta of three roundings of 9/8 each in the second moment.
    assert 0 < lost <= ((9 / 8) ** 3 - 1) / 4 * np.sum(given**2)


def test_bounds_are_those_at_the_power_of_two() -> None:
    unbiased, biased = min_max_dither(levels=5), top_k(k=1)
    assert rotated(unbiased).claims.variance(33, 3) == unbiased.claims.variance(64, 3)
    assert rotated(biased).claims.contraction(33, 1) == 1 / 64
    assert rotated(unbiased).claims.contraction is rotated(biased).claims.variance is None


def test_feedback_goes_outside() -> None:
    with pytest.raises(ValueError, match=r"`error_feedback\(rotated\(...\)\)`"):
        rotated(error_feedback(top_k(k=1))).init(jnp.ones(3))
    codec, x = error_feedback(rotated(top_k(k=2))), jnp.linspace(-1, 2, 11)
    memory, sent = codec.init(x), 0.0

    @jax.jit
    def one_step(key: jax.Array, memory: jaxcomm.Memory) -> tuple[jax.Array, jaxcomm.Memory]:
        context = context_of(codec, x, Coins(*jax.random.split(key)), memory)
        payload, memory = codec.encode(context, x)
        return codec.decode(context.received(), payload), memory

    for step in range(4):
        decoded, memory = one_step(jax.random.key(step), memory)
        sent = sent + decoded
        np.testing.assert_allclose(sent + memory.own.kept, (step + 1) * x, atol=1e-5)
