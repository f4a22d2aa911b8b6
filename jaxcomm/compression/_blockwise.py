"""A codec applied to blocks of coordinates, each with statistics of its own."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._base import Codec, Coins, Context, Diagnostics, Memory, PyTree
from jaxcomm._require import require_codec
from jaxcomm.compression._diagnosed import diagnose_each
from jaxcomm.compression._overflow import remembers
from pallas_kernels._dispatch import target


def _apart_on(platforms: tuple[str, ...], blocks: jax.Array) -> jax.Array:
    """The same, behind a barrier where that saves more than a pass."""
    return lax.optimization_barrier(blocks) if target().platform in platforms else blocks


def blockwise(codec: Codec, block_size: int) -> Codec:
    r"""Cuts an array into blocks of `block_size` coordinates and hands each to `codec`.

    .. math:: Q(x) = (Q(x_{1:b}), Q(x_{b+1:2b}), \ldots)

    A large coordinate then costs accuracy in its own block only. The last block is filled with
    zeros, which travel too.

    Args:
      codec: A codec that remembers nothing, but for `diagnostics=True`.
      block_size: Coordinates that share statistics; a Python int.

    Returns:
      A codec whose statistics and payload have one more leading dimension, the blocks, and that can
      be combined as `codec` can. It states the `variance` or `contraction` that `codec` states for
      a block: a bound on each block's part of the error is one on the whole.

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
    require_codec(codec, user="blockwise")
    if not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"`block_size` must be a Python int of at least 1, got {block_size}.")

    def to_blocks(x: jax.Array) -> jax.Array:
        flat = x.ravel()
        blocks = jnp.pad(flat, (0, -flat.size % block_size)).reshape(-1, block_size)
        # XLA for TPU then moves them to other rows and lanes, and not each array beside.
        return _apart_on(("tpu",), blocks)

    def from_blocks(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        # XLA for CPUs would find block and place of each coordinate by a division.
        return _apart_on(("tpu", "cpu"), blocks).ravel()[: math.prod(shape)].reshape(shape)

    def parts_of(context: Context) -> tuple[Coins, PyTree]:
        """The coins and statistics of each block."""
        count = -(-math.prod(context.shape) // block_size)
        return Coins(*(jax.random.split(key, count) for key in context.coins)), context.statistics

    def of_one(call: Callable[..., Any], context: Context) -> Callable[..., Any]:
        """`call` with the context of a block, of its coins, its statistics and what else it has."""

        def on_block(coins: Coins, statistics: PyTree, *given: PyTree) -> Any:
            return call(
                context.replace(coins=coins, statistics=statistics, shape=(block_size,)), *given
            )

        return on_block

    def init(x: jax.Array) -> Memory:
        memory = codec.init(jnp.zeros(block_size))
        if remembers(memory):
            raise ValueError(
                "`blockwise` takes codecs without memory; wrap it in feedback instead."
            )
        return memory

    def measure(context: Context, x: jax.Array) -> PyTree:
        return jax.vmap(of_one(codec.measure, context))(*parts_of(context), to_blocks(x))

    def encode(context: Context, x: jax.Array) -> tuple[PyTree, Memory]:
        encode_each = jax.vmap(of_one(codec.encode, context))
        payload, after = encode_each(*parts_of(context), to_blocks(x))
        return payload, jax.tree.map(lambda x: jnp.sum(x, axis=0, dtype=x.dtype), after)

    def decode(context: Context, payload: PyTree) -> jax.Array:
        blocks = jax.vmap(of_one(codec.decode, context))(*parts_of(context), payload)
        return from_blocks(blocks, context.shape)

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        blocks = to_blocks(x)
        # What is remembered was added up: the first block tells it for all.
        first = jnp.arange(len(blocks)) == 0
        afters = jax.tree.map(lambda total: jnp.where(first, total, 0), after)
        told = diagnose_each(of_one(codec.diagnose, context), *parts_of(context), blocks, afters)
        return told._replace(target=from_blocks(told.target, x.shape))

    def of_block(bound: Callable[[int, int], float] | None) -> Callable[[int, int], float] | None:
        return bound and (lambda size, workers: bound(block_size, workers))

    return codec._replace(
        init=init,
        measure=measure,
        encode=encode,
        decode=decode,
        diagnose=diagnose,
        claims=codec.claims._replace(
            variance=of_block(codec.claims.variance),
            contraction=of_block(codec.claims.contraction),
        ),
        layout="independent",
        drop_overflow=codec.drop_overflow and blockwise(codec.drop_overflow, block_size),
    )
