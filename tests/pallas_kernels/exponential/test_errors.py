"""Wrong arguments of `exponential` are told what is wrong."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.exponential import add, decode, encode

x = jnp.zeros(8, jnp.float32)
one = jnp.float32(1)
seeds = jnp.zeros(2, jnp.uint32)
codes = jnp.zeros(8, jnp.uint8)


@pytest.mark.parametrize(
    "call,error,message",
    [
        (lambda: encode(x.astype(jnp.int32), one, seeds, headroom=1), ValueError, "`x` must be"),
        (lambda: encode(x, x, seeds, headroom=1), ValueError, r"`scale` must be float32\[\]"),
        (lambda: encode(x, one, seeds[:1], headroom=1), ValueError, r"`seeds` must be uint32\[2\]"),
        (lambda: encode(x, one, seeds, headroom=0), ValueError, "`headroom`.*got 0"),
        (lambda: encode(x, one, seeds, headroom=63), ValueError, "`headroom`.*got 63"),
        (lambda: decode(x, one, headroom=1), ValueError, "`codes` must be uint8"),
        (lambda: decode(codes, one, headroom=63), ValueError, "`headroom`.*got 63"),
        (lambda: decode(codes, one, headroom=1, count=0), ValueError, "`count`.*got 0"),
        (lambda: decode(codes, codes, headroom=1), ValueError, "`scale`"),
        (
            lambda: add(codes, codes[1:], seeds),
            ValueError,
            r"the same shape, got \(8,\) and \(7,\)",
        ),
        (lambda: add(codes, x, seeds), ValueError, "`b` must be uint8"),
        (lambda: add(x, codes, seeds), ValueError, "`a` must be uint8"),
        (lambda: add(codes, codes, one), ValueError, "`seeds`"),
        (lambda: add(codes, codes, seeds, implementation="xla"), ValueError, "`implementation`"),
        (
            lambda: encode(x, one, seeds, headroom=1, implementation="mosaic_tpu"),
            NotImplementedError,
            "it runs on tpu",
        ),
        (
            lambda: decode(codes, one, headroom=1, implementation="mosaic_gpu"),
            NotImplementedError,
            "it runs on cuda",
        ),
        (
            lambda: jax.grad(lambda x: encode(x, one, seeds, headroom=1).sum() * 1.0)(x),
            TypeError,
            "no gradient",
        ),
    ],
)
def test_wrong_arguments_are_told(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_more_elements_than_are_counted_are_an_error():
    shape = (2**16, 2**16)
    encode_it = functools.partial(encode, headroom=1)
    with pytest.raises(ValueError, match=r"2\*\*32 elements"):
        jax.eval_shape(encode_it, jax.ShapeDtypeStruct(shape, jnp.float32), one, seeds)
    many = jax.ShapeDtypeStruct(shape, jnp.uint8)
    with pytest.raises(ValueError, match=r"2\*\*32 elements"):
        jax.eval_shape(add, many, many, seeds)
    fewer = jax.ShapeDtypeStruct((2**16, 2**16 - 1), jnp.uint8)
    assert jax.eval_shape(add, fewer, fewer, seeds).shape == fewer.shape
