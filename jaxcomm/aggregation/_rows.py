"""Rows of an array, one for each worker, which owns its mean: cuts, both exchanges, and memory."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import _axis
from jaxcomm._collectives import exchange_rows, gather_contents
from jaxcomm._contract import AxisName, Codec, Context, Keys, Memory, PyTree
from jaxcomm._resize import mean_over_workers
from jaxcomm.aggregation._all_gather import decode_local, decoded_mean, encode_local
from jaxcomm.aggregation._exchange import Part

RowOwnership = Literal["block", "cyclic"]


def to_rows(x: jax.Array, workers: int) -> jax.Array:
    """`[workers, ceil(size / workers)]`, padded with zeros."""
    flat = x.ravel()
    return jnp.pad(flat, (0, -flat.size % workers)).reshape(workers, -1)


def from_rows(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The first coordinates of the concatenated rows, as an array of `shape`."""
    size = math.prod(shape)
    return (rows if rows.size == size else rows.ravel()[:size]).reshape(shape)


def to_cyclic_rows(x: jax.Array, workers: int) -> jax.Array:
    """`[workers, ceil(length / workers), ...]`: the first axis dealt cyclically, and zeros."""
    leading = x if x.ndim else x[None]
    padding = [(0, -leading.shape[0] % workers), *((0, 0) for _ in leading.shape[1:])]
    padded = jnp.pad(leading, padding)
    rounds = padded.shape[0] // workers
    return jnp.swapaxes(padded.reshape(rounds, workers, *padded.shape[1:]), 0, 1)


def from_cyclic_rows(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `to_cyclic_rows` for an array of `shape`."""
    return from_rows(jnp.swapaxes(rows, 0, 1), shape)


def to_block_rows(x: jax.Array, workers: int) -> jax.Array:
    """Like :func:`to_rows`, but keeps the dimensions if `workers` divides the first axis."""
    if x.ndim > 1 and x.shape[0] % workers == 0:
        return x.reshape(workers, x.shape[0] // workers, *x.shape[1:])
    return to_rows(x, workers)


class RowCut(NamedTuple):
    """The functions that split an array into rows and join them again."""

    split: Callable[[jax.Array, int], jax.Array]  # (x, workers) -> [workers, ...]
    join: Callable[[jax.Array, tuple[int, ...]], jax.Array]  # (rows, shape) -> x


ROW_CUTS: dict[str, RowCut] = {
    "block": RowCut(to_block_rows, from_rows),
    "cyclic": RowCut(to_cyclic_rows, from_cyclic_rows),
}


def to_slices(x: jax.Array, workers: int) -> jax.Array:
    """`[workers, ...]`: equal parts with as many dimensions as `x`, padded with zeros.

    If `workers` divides the first axis, the other dimensions are kept. Otherwise a part has all
    coordinates on its last axis. A scalar has one coordinate, in the first part.
    """
    if x.ndim and x.shape[0] % workers == 0:
        return x.reshape(workers, x.shape[0] // workers, *x.shape[1:])
    rows = to_rows(x, workers)
    return rows.reshape(workers, *([1] * (x.ndim - 1) + [rows.shape[1]] if x.ndim else []))


def without_padding(part: jax.Array, me: jax.Array, size: int, workers: int) -> jax.Array:
    """Part `me` of an array of `size` coordinates, with zeros where it has padding."""
    if part.size * workers == size:
        return part
    filled = np.clip(size - np.arange(workers) * part.size, 0, part.size)
    position = jnp.arange(part.size).reshape(part.shape)
    return jnp.where(position < jnp.asarray(filled)[me], part, jnp.zeros((), part.dtype))


def keys_of_rows(units: Sequence[Keys], workers: int) -> list[Keys]:
    """Independent keys for each row of each unit, key[workers, ...]; a stack has several keys."""
    split = _of_all_keys(units, lambda key: jax.random.split(key, workers))
    return jax.tree.map(lambda keys: jnp.moveaxis(keys, -1, 0), split)


def keys_of_means(units: Sequence[Keys], workers: int) -> list[Keys]:
    """Keys for the mean of each unit, key[...], independent of those of its rows."""
    return _of_all_keys(units, lambda key: jax.random.fold_in(key, workers))


def _of_all_keys(units: Sequence[Keys], function: Callable[[jax.Array], jax.Array]) -> list[Keys]:
    """Threefry is called once for all units: a call takes longer to compile than a small unit."""

    def of(keys: Sequence[jax.Array]) -> list[jax.Array]:
        ends = np.cumsum([key.size for key in keys])
        found = jax.vmap(function)(jnp.concatenate([key.ravel() for key in keys]))
        parts = [found[end - key.size : end] for key, end in zip(keys, ends, strict=True)]
        shapes = [(*key.shape, *found.shape[1:]) for key in keys]
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    if not units:
        return []
    shared, private = zip(*units, strict=True)
    return [*map(Keys, of(shared), of(private))]


def mean_of_owned(
    codec: Codec, me: jax.Array, context: Context, content: PyTree, shape: tuple[int, ...]
) -> jax.Array:
    """The mean of the received payloads of row `me`, float32; `context` is that of all rows."""
    # All senders encoded this worker's row with the shared key of that row.
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
        shape,
        added=from_sender(codec.fast.add) if codec.fast.add else None,
    )


def decode_rows(codec: Codec, context: Context, content: PyTree) -> jax.Array:
    """Decodes the rows of all workers, whose shared keys are that of `context`."""
    rows: jax.Array = jax.vmap(functools.partial(decode_local, codec, context))(content)
    return rows


def _encoded(parts: list[Part], keys: list[Keys], *, of_rows: bool) -> list[Part]:
    """The parts with payloads, and the memory after them; a stack has several keys."""

    def encoded(part: Part, own: Keys) -> Part:
        context = Context(own, part.context.memory, shape=part.x.shape[own.shared.ndim :])
        encode = functools.partial(encode_local, part.codec)
        content, memory = (jax.vmap(encode) if of_rows else encode)(context, part.x)
        context = context.replace(statistics=content[1])
        return part._replace(payload=content, context=context, memory=memory)

    return [*map(encoded, parts, keys)]


def push_rows(
    axis_name: AxisName, parts: list[Part], beside: PyTree = ()
) -> tuple[list[Part], PyTree]:
    """Sends each owner its row of each unit, encoded; the owner averages in float32.

    Args:
      axis_name: The axis of the owners.
      parts: Rows `[workers, ...]` with the codec of a row, which for a stack is `stacked`, and the
        keys of the unit.
      beside: What travels in the same message, leaves `[workers, ...]`.

    Returns:
      The parts, whose `mean` is that of the row that this worker owns; and what came beside.
    """
    workers, me = _axis.size(axis_name), _axis.index(axis_name)
    keys = keys_of_rows([part.context.keys for part in parts], workers)
    parts = _encoded(parts, keys, of_rows=True)
    with jax.named_scope("rows"):
        received, beside = exchange_rows(([part.payload for part in parts], beside), axis_name)
    means = [
        mean_of_owned(part.codec, me, part.context, content, part.x.shape[1:])
        for part, content in zip(parts, received, strict=True)
    ]
    return [part._replace(mean=x) for part, x in zip(parts, means, strict=True)], beside


def pull_rows(
    axis_name: AxisName, parts: list[Part], beside: PyTree = ()
) -> tuple[list[Part], PyTree]:
    """Sends the row that this worker owns to all workers, encoded: the inverse of `push_rows`.

    Returns:
      The parts, whose `mean` has the rows of all workers, and what came beside; `[workers, ...]`.
    """
    parts = _encoded(parts, [part.context.keys for part in parts], of_rows=False)
    with jax.named_scope("means"):
        gathered, beside = gather_contents(([part.payload for part in parts], beside), axis_name)
    rows = [
        decode_rows(part.codec, part.context, content)
        for part, content in zip(parts, gathered, strict=True)
    ]
    return [part._replace(mean=x) for part, x in zip(parts, rows, strict=True)], beside


def recut_memory(
    cut: Callable[[PyTree, int], list[jax.Array]],
    join: Callable[[list[jax.Array], int], PyTree],
    whole: PyTree,
    old: list[PyTree],
    new: list[PyTree],
    *,
    of_rows: bool,
    user: str,
) -> list[PyTree]:
    """The memory of units for other owners of rows.

    Args:
      cut: From a whole, and the number of workers, to the rows of each unit.
      join: The inverse of `cut`.
      whole: An example of the whole.
      old: The memory of each unit, leaves `[old workers, ...]`.
      new: The initial memory for the new workers.
      of_rows: Whether each worker has memory for all rows, which takes its mean over workers.
        Otherwise it has that of the row that it owns.
      user: The aggregator, for the error.

    Raises:
      ValueError: If the codec keeps memory that is no array like its rows.
    """

    def resized(old: list[jax.Array], new: list[jax.Array]) -> list[jax.Array]:
        for arrays in (old, new):
            expected: Any = jax.eval_shape(functools.partial(cut, whole, len(arrays[0])))
            if [x.shape[of_rows:] for x in arrays] != [x.shape for x in expected]:
                raise ValueError(
                    f"A codec of `{user}` keeps memory that is no array like its rows, so it "
                    "cannot be cut for another number of workers. Make a new state with "
                    "`jaxcomm.init`."
                )
        before, workers = len(old[0]), len(new[0])
        if of_rows:
            old = [mean_over_workers(x, 1, f" of `{user}`")[0] for x in old]
        rows = cut(join(old, before), workers)
        return [
            jnp.broadcast_to(x, y.shape).astype(y.dtype) for x, y in zip(rows, new, strict=True)
        ]

    leaves = [[*zip(*map(jax.tree.leaves, memory), strict=True)] for memory in (old, new)]
    columns = [resized([*before], [*after]) for before, after in zip(*leaves, strict=True)]
    return [
        jax.tree.unflatten(jax.tree.structure(memory), [column[unit] for column in columns])
        for unit, memory in enumerate(new)
    ]
