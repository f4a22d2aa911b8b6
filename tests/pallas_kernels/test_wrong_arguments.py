"""What would give wrong numbers is refused, and what has no gradient says so."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import _dispatch, block_float, count_sketch, exponential
from pallas_kernels.pack import bits_for_sum, unpack
from pallas_kernels.quantize import dequantize, quantize

X, ONE, SEEDS = jnp.ones(50), jnp.float32(1), jnp.array([1, 2], jnp.uint32)
WHOLE, BYTES, WORDS = jnp.ones(50, jnp.int32), jnp.ones(50, jnp.uint8), jnp.ones(8, jnp.uint32)
TABLE = jnp.ones((1, 1024))
to_bytes = functools.partial(quantize, levels=127, bits=8)
from_bytes = functools.partial(dequantize, levels=127, bits=8, shape=(50,))
fed_back = functools.partial(to_bytes, X, ONE, SEEDS, residual=True)
powers = functools.partial(exponential.encode, headroom=1)
sketch = functools.partial(count_sketch.encode, rows=1, columns=1024)
estimate = functools.partial(count_sketch.decode, seeds=SEEDS, shape=(3,))

REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: to_bytes(WHOLE, ONE, SEEDS), "`x` must be float32 or bfloat16, got int32"),
    (lambda: to_bytes(X, ONE, SEEDS, levels=128), "`bits`=8 cannot hold the sum of 1 codes of"),
    (
        lambda: to_bytes(X, ONE, SEEDS, levels=2**24, bits=32),
        r"`levels` must be in \[1, 16777215\], got 16777216",
    ),
    (lambda: fed_back(added=X[:3]), r"`added` must be float32 or bfloat16 \[50\], got"),
    (lambda: fed_back(added=X, divisor=0.0), "`divisor` must be positive, got 0"),
    (lambda: from_bytes(BYTES, ONE, bits=4, levels=7), r"`codes` must be uint32\[7\]"),
    (lambda: from_bytes(BYTES, ONE, count=2), "`bits`=8 cannot hold the sum of 2 codes"),
    (lambda: unpack(WORDS, bits=4, shape=(65,)), r"`packed` must be uint32\[9\]"),
    (lambda: bits_for_sum(2**31, 2), "does not fit in 32 bits"),
    (lambda: powers(X, ONE, SEEDS, headroom=63), "`headroom`.*got 63"),
    (lambda: exponential.add(BYTES, BYTES[1:], SEEDS), r"the same shape, got \(50,\) and \(49,\)"),
    (
        lambda: block_float.decode(X.astype("int8"), BYTES),
        r"`exponents` must be uint8\[2\] for 50 elements",
    ),
    (lambda: sketch(X, SEEDS, columns=1500), "nearest is 1024, and .*elements"),
    (lambda: estimate(TABLE, mask=jnp.ones(4, bool)), "`mask` must be"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_is_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_a_counter_does_not_wrap() -> None:
    """2**32 elements or more would have the noise of others."""
    many, fewer = (jax.ShapeDtypeStruct((2**16, 2**16 - n), jnp.float32) for n in (0, 1))
    encode = functools.partial(sketch, seeds=SEEDS)
    for f in (lambda x: to_bytes(x, ONE, SEEDS), encode):
        with pytest.raises(ValueError, match=r"2\*\*32 elements or more: split the leaf"):
            jax.eval_shape(f, many)
        assert jax.eval_shape(f, fewer) is not None
    for hashing in ("tiles", "elements"):
        with pytest.raises(ValueError, match=r"2\*\*32"):
            jax.eval_shape(lambda t, h=hashing: estimate(t, shape=many.shape, hashing=h), TABLE)


def test_nondifferentiable_is_the_identity_and_names_the_op() -> None:
    x, codes = jnp.arange(3.0), jnp.arange(3)
    same, same_codes = jax.jit(jax.vmap(lambda *a: _dispatch.nondifferentiable("op", *a)))(x, codes)
    assert same.tolist() == x.tolist() and same_codes.tolist() == codes.tolist()

    def loss(x: jax.Array) -> jax.Array:
        return _dispatch.nondifferentiable("some_op", x)[0].sum()

    for differentiate in (jax.grad, jax.jacfwd, jax.hessian):
        with pytest.raises(TypeError, match="`some_op` rounds, so it has no gradient"):
            differentiate(loss)(jnp.ones(3))
    gradient = jax.grad(lambda x: (x * loss(jax.lax.stop_gradient(x))).sum())(jnp.ones(3))
    assert gradient.tolist() == [3, 3, 3]
