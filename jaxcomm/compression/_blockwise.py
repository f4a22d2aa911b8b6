"""A codec applied to blocks of coordinates, each with statistics of its own."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxcomm._base import Codec, Coins, Memory, PyTree
from jaxcomm._require import require_codec
from jaxcomm.compression._overflow import remembers


def blockwise(codec: Codec, block_size: int) -> Codec:
    r"""Cuts an array into blocks of `block_size` coordinates and hands each to `codec`.

    .. math:: Q(x) = (Q(x_{1:b}), Q(x_{b+1:2b}), \ldots)

    A large coordinate then costs accuracy in its own block only. The last block is filled with
    zeros, which travel too.

    Args:
      codec: A codec that remembers nothing, but for `info=True`.
      block_size: Coordinates that share statistics; a Python int.

    Returns:
      A codec whose statistics and payload have one more leading dimension, the blocks, and that can
      be combined as `codec` can. It states the `variance` or `contraction` that `codec` states for
      a block: a bound on each block's part of the error is one on the whole.

    Raises:
      ValueError: If `block_size` is not a positive int, or, in `init`, if the codec has memory.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm import Coins
      >>> from jaxcomm.compression import blockwise
      >>> from jaxcomm.compression.quantizers import dither
      >>> codec, coins = blockwise(dither(), 4), Coins(jax.random.key(0), jax.random.key(1))
      >>> x = jnp.array([1.0, -5.0, 0.0, 2.0, 0.5])
      >>> print(codec.measure(coins, codec.init(x), x).max_abs)
      [5.  0.5]
    """
    require_codec(codec, user="blockwise")
    if not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"`block_size` must be a Python int of at least 1, got {block_size}.")

    def to_blocks(x: jax.Array) -> jax.Array:
        flat = x.ravel()
        return jnp.pad(flat, (0, -flat.size % block_size)).reshape(-1, block_size)

    def coins_of_blocks(coins: Coins, count: int) -> Coins:
        return Coins(*(jax.random.split(key, count) for key in coins))

    def init(x: jax.Array) -> Memory:
        memory = codec.init(jnp.zeros(block_size))
        if remembers(memory):
            raise ValueError(
                "`blockwise` takes codecs without memory; wrap it in feedback instead."
            )
        return memory

    def measure(coins: Coins, memory: Memory, x: jax.Array) -> PyTree:
        blocks = to_blocks(x)
        each = coins_of_blocks(coins, len(blocks))
        return jax.vmap(codec.measure, in_axes=(0, None, 0))(each, memory, blocks)

    def encode(
        coins: Coins, memory: Memory, x: jax.Array, agreed: PyTree, workers: int
    ) -> tuple[PyTree, Memory]:
        blocks = to_blocks(x)
        each = coins_of_blocks(coins, len(blocks))
        payload, after = jax.vmap(
            lambda coins, block, agreed: codec.encode(coins, memory, block, agreed, workers)
        )(each, blocks, agreed)
        return payload, jax.tree.map(lambda x: jnp.sum(x, axis=0, dtype=x.dtype), after)

    def decode(
        public: jax.Array,
        payload: PyTree,
        agreed: PyTree,
        workers: int,
        count: int,
        shape: tuple[int, ...],
    ) -> jax.Array:
        size = math.prod(shape)
        each = jax.random.split(public, -(-size // block_size))
        blocks = jax.vmap(
            lambda public, payload, agreed: codec.decode(
                public, payload, agreed, workers, count, (block_size,)
            )
        )(each, payload, agreed)
        return blocks.ravel()[:size].reshape(shape)

    def observe(
        public: jax.Array, agreed: PyTree, x: jax.Array
    ) -> dict[str, tuple[jax.Array, jax.Array]]:
        blocks = to_blocks(x)
        each = jax.random.split(public, len(blocks))
        return jax.tree.map(jnp.sum, jax.vmap(codec.observe)(each, agreed, blocks))

    def of_block(bound: Callable[[int, int], float] | None) -> Callable[[int, int], float] | None:
        return bound and (lambda size, workers: bound(block_size, workers))

    return codec._replace(
        init=init,
        measure=measure,
        encode=encode,
        decode=decode,
        observe=observe,
        variance=of_block(codec.variance),
        contraction=of_block(codec.contraction),
        dropping=codec.dropping and blockwise(codec.dropping, block_size),
    )
