"""The two halves of an exchange by owners of rows: rows to their owners, and rows to all workers.

Between them, each worker has the mean of the row that it owns.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jaxcomm._contract import Codec, Coins, Context, Memory, PyTree
from jaxcomm._units import Unit
from jaxcomm.aggregation._gathered import decoded_mean
from jaxcomm.aggregation._local import decode_local, encode_local

_Function = TypeVar("_Function", bound=Callable[..., Any])


def map_stack(unit: Unit, function: _Function, in_axes: Any = 0, out_axes: Any = 0) -> _Function:
    """Maps a function of one leaf over a stack; in a message, the stack is the second axis."""
    stacked = unit.form == "stacked"
    return jax.vmap(function, in_axes, out_axes) if stacked else function


def split_coins(coins: Coins, workers: int) -> Coins:
    """Independent coins for each row, key[workers] each."""
    return Coins(*(jax.random.split(key, workers) for key in coins))


def encode_rows(
    codec: Codec, context: Context, rows: jax.Array
) -> tuple[tuple[PyTree, PyTree], Context, Memory]:
    """Encodes rows `[workers, ...]`, each with separate coins, memory and statistics.

    Returns:
      The payloads with their statistics, [workers, ...]; the context with these statistics; and the
      memory after encoding.
    """
    content, memory = jax.vmap(functools.partial(encode_local, codec))(context, rows)
    return content, context.replace(statistics=content[1]), memory


def mean_of_owned(codec: Codec, me: jax.Array, context: Context, content: PyTree) -> jax.Array:
    """The mean of the received payloads of row `me`, float32; `context` is that of all rows."""
    # All senders encoded this worker's row with the public coin of that row.
    mine = jax.tree.map(lambda x: x[me], context.replace(memory=Memory()))

    def from_sender(decode: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def apply(content: tuple[PyTree, PyTree], *rest: Any) -> jax.Array:
            payload, measured = content
            return decode(mine.received().replace(statistics=measured), payload, *rest)

        return apply

    return decoded_mean(
        from_sender(codec.decode),
        content,
        mine.replace(statistics=()),
        mine.shape,
        added=from_sender(codec.fast.add) if codec.fast.add else None,
    )


def decode_rows(codec: Codec, context: Context, content: PyTree) -> jax.Array:
    """Decodes the rows of all workers, whose public coins are that of `context`."""
    rows: jax.Array = jax.vmap(functools.partial(decode_local, codec, context))(content)
    return rows
