"""Codecs of several arrays of one shape, encoded independently: rows, or blocks of coordinates."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._contract import (
    Codec,
    Context,
    Diagnostics,
    Entries,
    Fast,
    Keys,
    Memory,
    PyTree,
    scattered,
)
from jaxcomm._require import Positive, checked
from jaxcomm.compression._bits import Alphabet, Integers, require_countable
from jaxcomm.compression._means import over_peak
from jaxcomm.compression._scaled import bounds_at, without_memory
from pallas_kernels._dispatch import target


def diagnose_each(diagnose: Callable[..., Diagnostics], *each: Any) -> Diagnostics:
    """Maps `diagnose` over the leading axes and reduces the results; the targets stay stacked."""
    constants: dict[str, float] = {}

    def diagnose_one(*args: Any) -> Diagnostics:
        diagnostics = diagnose(*args)
        constants.update(diagnostics.constants)
        return diagnostics._replace(constants={})  # Constants are not arrays.

    diagnostics = jax.vmap(diagnose_one)(*each)
    peak = jnp.max(jnp.abs(diagnostics.target), initial=0)
    scaled = over_peak(diagnostics.target, peak)  # So that squares do not overflow.
    squares = jnp.sum(jnp.square(scaled), axis=range(1, scaled.ndim))
    whole = jnp.sum(squares)
    shares = squares / jnp.where(whole > 0, whole, 1)
    return Diagnostics(
        diagnostics.target,
        jax.tree.map(jnp.sum, diagnostics.totals),
        jax.tree.map(jnp.sum, diagnostics.ratios),
        jax.tree.map(lambda error: jnp.sum(shares * error), diagnostics.errors),
        constants,
    )


def stacked(codec: Codec) -> Codec:
    r"""Encodes each row of `[rows, *shape]` with separate PRNG keys, memory and statistics.

    .. math:: Q(x_1, x_2, \ldots) = (Q(x_1), Q(x_2), \ldots)

    All rows share one vectorized program: one copy per row would take longer to compile, the more
    rows there are. All arrays of a context have one more leading dimension; its `shape` is that of
    one row.
    """
    return codec.replace(
        init=jax.vmap(codec.init),
        measure=jax.vmap(codec.measure),
        encode=jax.vmap(codec.encode),
        decode=jax.vmap(codec.decode),
        finalize=jax.vmap(codec.finalize),
        diagnose=lambda *args: diagnose_each(codec.diagnose, *args),
        drop_overflow=codec.drop_overflow and stacked(codec.drop_overflow),
    )


def _barrier_on(platforms: tuple[str, ...], blocks: jax.Array) -> jax.Array:
    """`blocks`, behind a barrier on the platforms where it saves more than one pass."""
    return lax.optimization_barrier(blocks) if target().platform in platforms else blocks


@checked
def blockwise(codec: Codec, block_size: Positive) -> Codec:
    r"""Cuts an array into blocks of `block_size` coordinates and encodes each with `codec`.

    .. math:: Q(x) = (Q(x_{1:b}), Q(x_{b+1:2b}), \ldots)

    A large coordinate then reduces the accuracy of its own block only. The last block is padded
    with zeros, which are sent too.

    Args:
      codec: A codec without memory. Memory that exists for `diagnostics=True` only is allowed.
      block_size: The number of coordinates that share statistics; a Python int.

    Returns:
      A codec whose statistics and payload have one more leading dimension, the blocks. Its
      `combine` is that of `codec`. It states the `variance` or `contraction` that `codec` states
      for one block: a bound on the error of each block is also a bound on the whole error.

    Raises:
      ValueError: If `block_size` is not a positive int, or, in `init`, if the codec has memory.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression import blockwise
      >>> from jaxcomm.compression.quantizers import dither
      >>> codec, x = blockwise(dither(), 4), jnp.array([1.0, -5.0, 0.0, 2.0, 0.5])
      >>> print(codec.measure(Context.of(x), x).max_abs)
      [5.  0.5]
    """

    def to_blocks(x: jax.Array) -> jax.Array:
        flat = x.ravel()
        blocks = jnp.pad(flat, (0, -flat.size % block_size)).reshape(-1, block_size)
        # With the barrier, XLA for TPU changes the layout of this array only, not of others.
        return _barrier_on(("tpu",), blocks)

    def from_blocks(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        # Without the barrier, XLA for CPUs finds the block of each coordinate by a division.
        return _barrier_on(("tpu", "cpu"), blocks).ravel()[: math.prod(shape)].reshape(shape)

    def within(context: Context) -> Context:
        """The contexts of all blocks, stacked."""
        count = -(-math.prod(context.shape) // block_size)
        keys = Keys(*(jax.random.split(key, count) for key in context.keys))
        return context.replace(keys=keys, memory=Memory(), shape=(block_size,))

    def init(x: jax.Array) -> Memory:
        return without_memory(codec.init(jnp.zeros(block_size)), "blockwise")

    def measure(context: Context, x: jax.Array) -> PyTree:
        return jax.vmap(codec.measure)(within(context), to_blocks(x))

    def encode(context: Context, x: jax.Array) -> tuple[PyTree, Memory]:
        payload, after = jax.vmap(codec.encode)(within(context), to_blocks(x))
        return payload, jax.tree.map(lambda x: jnp.sum(x, axis=0, dtype=x.dtype), after)

    def decode(context: Context, payload: PyTree) -> jax.Array:
        return from_blocks(jax.vmap(codec.decode)(within(context), payload), context.shape)

    def entries(context: Context, payload: PyTree) -> Entries:
        assert codec.fast.entries is not None
        indices, values = jax.vmap(codec.fast.entries)(within(context), payload)
        first = jnp.arange(len(indices), dtype=jnp.uint32)[:, None] * jnp.uint32(block_size)
        # An entry beyond the end of its block is unused, and must not be one of the next.
        size = jnp.uint32(require_countable(math.prod(context.shape)))
        inside = jnp.where(indices < block_size, first + indices, size)
        return Entries(inside.ravel(), values.ravel())

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        blocks = to_blocks(x)
        # `encode` summed the memory over blocks, so only the first block reports it.
        first = jnp.arange(len(blocks)) == 0
        afters = jax.tree.map(lambda total: jnp.where(first, total, 0), after)
        diagnostics = diagnose_each(codec.diagnose, within(context), blocks, afters)
        return diagnostics._replace(target=from_blocks(diagnostics.target, x.shape))

    def integers_of_blocks(inner: Integers) -> Integers:
        """The levels of all blocks, one block after the other."""

        def alphabet(context: Context) -> Alphabet:
            of_block = inner.alphabet(context.replace(shape=(block_size,)))
            return of_block._replace(number=-(-math.prod(context.shape) // block_size) * block_size)

        def split(context: Context, payload: PyTree) -> tuple[jax.Array, PyTree]:
            levels, rest = jax.vmap(inner.split)(within(context), payload)
            return levels.ravel(), rest

        def join(context: Context, levels: jax.Array, rest: PyTree) -> PyTree:
            return jax.vmap(inner.join)(within(context), levels.reshape(-1, block_size), rest)

        return inner._replace(
            alphabet=alphabet, split=split, join=join, likely=lambda size: inner.likely(block_size)
        )

    integers = codec.fast.integers
    has_levels = integers is not None and integers.kind == "levels"
    return codec.replace(
        init=init,
        measure=measure,
        encode=encode,
        decode=scattered(entries) if codec.fast.entries else decode,
        diagnose=diagnose,
        claims=bounds_at(codec.claims, lambda size, workers: (block_size, workers)),
        layout="independent",
        drop_overflow=codec.drop_overflow and blockwise(codec.drop_overflow, block_size),
        fast=Fast(
            exposes_nonfinite=tuple({"decode"} & {*codec.fast.exposes_nonfinite}),
            entries=entries if codec.fast.entries else None,
            integers=integers_of_blocks(integers) if has_levels else None,
        ),
    )
