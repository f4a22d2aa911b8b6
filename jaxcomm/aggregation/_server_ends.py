"""What workers push to the owners of slices and pull from them, and their memory after a resize.

Each end sends exact values in their dtypes, or payloads of a codec. A tree of rows has leaves
`[workers, ...]`, with one slice per worker; a tree of slices has those of one worker.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _axis, _units
from jaxcomm._collectives import exchange_rows, gather_contents
from jaxcomm._contract import AxisName, Codec, Coins, Context, Memory, PyTree
from jaxcomm._resize import mean_over_workers
from jaxcomm._units import LARGE, Scope, Unit
from jaxcomm.aggregation._all_gather import encode_local, local_memory
from jaxcomm.aggregation._coded import restored, separated, unit_context, weigh
from jaxcomm.aggregation._exchange import all_finite, join_small
from jaxcomm.aggregation._mean import mean_of_rows
from jaxcomm.aggregation._rows import (
    coins_of_rows,
    decode_rows,
    encode_rows,
    from_slices,
    map_stack,
    mean_of_owned,
    to_slices,
)
from jaxcomm.compression._blockwise import stacked


class Pushed(NamedTuple):
    """The result of the first exchange on one worker."""

    means: PyTree  # its slices of the mean
    finite: jax.Array  # bool[], whether all workers sent finite gradients; not typed as equal
    memory: list[PyTree]  # the `Memory.own` of each unit after encoding


class Pulled(NamedTuple):
    """The result of the second exchange, equal on all workers except the memory."""

    rows: PyTree  # of all workers
    finite: jax.Array  # bool[], whether `finite` was true on all workers and the rows are finite
    memory: list[PyTree]


def _flag(finite: jax.Array) -> jax.Array:
    """float32[], as wide as the values beside it, which therefore stay whole words."""
    return jnp.where(finite, 0.0, 1.0).astype(jnp.float32)


def clip_slices(axis_name: AxisName, slices: PyTree, max_norm: float) -> PyTree:
    """Scales slices of all workers down together if the norm of all of them exceeds `max_norm`.

    They become NaN if that norm overflows. Workers send one float32.
    """
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(slices)]
    own = _axis.as_varying(jnp.sum(jnp.stack(squares)), axis_name)
    norm = jnp.sqrt(lax.psum(own, _axis.names(axis_name)))
    factor = jnp.where(norm > max_norm, max_norm / norm, 1)
    factor = jnp.where(jnp.isfinite(norm), factor, jnp.nan)
    return jax.tree.map(lambda x: x * factor.astype(x.dtype), slices)


def leaves_finite(tree: PyTree) -> jax.Array:
    """Whether no coordinate of any leaf is NaN or infinite, bool[]; small leaves are joined."""
    leaves = [x for x in jax.tree.leaves(tree) if x.size]
    return all_finite(join_small(leaves, LARGE)[0]) if leaves else jnp.array(True)


def push_exactly(axis_name: AxisName, rows: PyTree, weight: jax.Array | None) -> Pushed:
    """Sends each owner its rows in their dtypes; the owner averages in at least float32."""
    leaves, treedef = jax.tree.flatten(rows)
    finite = leaves_finite(leaves)
    if weight is not None:
        finite = jnp.isfinite(weight) & (finite | (weight == 0))
    each = lambda x: None if x is None else jnp.broadcast_to(x, (_axis.size(axis_name),))  # noqa: E731
    received, flags, weights = exchange_rows((leaves, each(_flag(finite)), each(weight)), axis_name)
    means = [mean_of_rows(x, weights) for x in received]
    return Pushed(jax.tree.unflatten(treedef, means), jnp.all(flags == 0), [])


def pull_exactly(axis_name: AxisName, slices: PyTree, finite: jax.Array) -> Pulled:
    """Sends this worker's slices to all workers in their dtypes."""
    rows, flags = gather_contents((slices, _flag(finite)), axis_name)
    return Pulled(rows, jnp.all(flags == 0), [])


@dataclasses.dataclass(frozen=True)
class CodedEnd:
    """An end with a codec, which encodes each slice, or several slices of a worker as one unit.

    Attributes:
      codec: The codec of a unit of one worker's slices.
      scope: Which leaves form a unit.
      bucket_bytes: The maximum size of a unit of several leaves, in float32 bytes.
      of_rows: Whether the units are rows of all workers, as in the first exchange, each with
        separate memory.
    """

    codec: Codec
    scope: Scope
    bucket_bytes: int
    of_rows: bool

    def _divide(self, slices: PyTree) -> _units.Split:
        return _units.split(
            slices, self.scope, self.bucket_bytes, layout=self.codec.layout, stacks=True
        )

    def _divided(self, tree: PyTree) -> _units.Split:
        """The units of slices, or of rows: `[leaves, workers, ...]` if they are stacks.

        `join` is of the slices of one worker.
        """
        if not self.of_rows or not jax.tree.leaves(tree):
            return self._divide(tree)
        one = self._divide(jax.tree.map(lambda x: x[0], tree))
        arrays = jax.vmap(lambda slices: self._divide(slices).arrays)(tree)
        return one._replace(
            arrays=[
                jnp.swapaxes(x, 0, 1) if unit.form == "stacked" else x
                for unit, x in zip(one.units, arrays, strict=True)
            ]
        )

    def _codec_of(self, unit: Unit) -> Codec:
        """The codec whose memory is that of a unit."""
        codec = self.codec.replace(init=lambda x: Memory(self.codec.init(x).own))
        if self.of_rows:
            codec = stacked(codec)
        return stacked(codec) if unit.form == "stacked" else codec

    def init(self, tree: PyTree) -> list[PyTree]:
        """The first `Memory.own` of each unit."""
        arrays, units, _ = self._divided(tree)
        for unit, x in zip(units, arrays, strict=True):
            axes = self.of_rows + (unit.form == "stacked")
            one = x.reshape(-1, *x.shape[axes:])[0] if x.size else jnp.zeros(x.shape[axes:])
            local_memory(self.codec, one, "sharded_server", "the owner of a slice")
        return [self._codec_of(unit).init(x).own for unit, x in zip(units, arrays, strict=True)]

    def units_of(self, rows: PyTree) -> list[jax.Array]:
        """The units of the rows of all workers, as memory holds them.

        In memory of rows, the axis of a stack precedes that of workers; in memory of owners, it
        follows.
        """
        return self._divided(rows).arrays if self.of_rows else jax.vmap(self._arrays)(rows)

    def _arrays(self, slices: PyTree) -> list[jax.Array]:
        return self._divide(slices).arrays

    def join_rows(self, units: list[jax.Array], slices: PyTree) -> PyTree:
        """The inverse of `units_of`; `slices` are like those of one worker."""
        split = self._divide(slices)
        axes = [int(self.of_rows and unit.form == "stacked") for unit in split.units]
        rows: PyTree = jax.vmap(split.join, in_axes=(axes,))(units)
        return rows

    def coins(self, tree: PyTree) -> int:
        """The number of coins that the units of a tree take."""
        return 1 + max((max(unit.coins) for unit in self._divided(tree).units), default=-1)

    def _contexts(self, split: _units.Split, coins: Coins, memory: list[PyTree]) -> list[Context]:
        """The contexts of the units, with the memory of the last step."""
        arrays, units, _ = split
        if len(memory) != len(units):
            raise ValueError(
                f"This state has {len(memory)} buckets or leaves, but these updates have "
                f"{len(units)}. It was made for other parameters, or for another `scope` or "
                "`bucket_bytes`: make a new state with `jaxcomm.init`."
            )
        return [
            unit_context(coins, unit, restored(self._codec_of(unit), x, Memory(own)), x)
            for unit, x, own in zip(units, arrays, separated(memory), strict=True)
        ]

    def push(
        self,
        axis_name: AxisName,
        rows: PyTree,
        coins: Coins,
        memory: list[PyTree],
        weight: jax.Array | None,
    ) -> Pushed:
        """Sends each owner its rows, encoded; the owner averages in float32."""
        workers, me = _axis.size(axis_name), _axis.index(axis_name)
        split = self._divided(rows)
        weighed = (lambda x: x) if weight is None else weigh(axis_name, weight, split.arrays)
        arrays = [*map(weighed, split.arrays)]
        contexts = self._contexts(split, coins, memory)

        def send(
            coins: Coins, memory: Memory, rows: jax.Array
        ) -> tuple[PyTree, tuple[Context, Memory]]:
            row = Context(coins, memory, shape=rows.shape[1:])
            content, row, after = encode_rows(self.codec, row, rows)
            return content, (row, after)

        filled = [number for number, x in enumerate(arrays) if x.size]
        of_rows = coins_of_rows([contexts[i].coins for i in filled], workers)
        sent = [
            map_stack(split.units[i], send, 0, (1, 0))(own, contexts[i].memory, arrays[i])
            for i, own in zip(filled, of_rows, strict=True)
        ]
        flags = jnp.broadcast_to(_flag(leaves_finite(arrays)), (workers,))
        received, flags = exchange_rows(([content for content, _ in sent], flags), axis_name)
        owned = partial(mean_of_owned, self.codec, me)
        means = [
            x[:, 0] if u.form == "stacked" else x[0]
            for u, x in zip(split.units, arrays, strict=True)
        ]
        after = [context.memory for context in contexts]
        for i, (_, (row, memory_of_rows)), content in zip(filled, sent, received, strict=True):
            means[i] = map_stack(split.units[i], owned, (0, 1))(row, content)
            after[i] = memory_of_rows
        kept = [each.own for each in after]
        return Pushed(split.join(means), jnp.all(flags == 0), kept)

    def pull(
        self,
        axis_name: AxisName,
        slices: PyTree,
        coins: Coins,
        memory: list[PyTree],
        finite: jax.Array,
    ) -> Pulled:
        """Sends this worker's slices to all workers, encoded."""
        split = self._divided(slices)
        contexts = self._contexts(split, coins, memory)
        encode = partial(encode_local, self.codec)
        filled = [number for number, x in enumerate(split.arrays) if x.size]
        sent = []
        for i in filled:
            context = contexts[i]
            of_one = (
                split.arrays[i].shape[1:]
                if split.units[i].form == "stacked"
                else split.arrays[i].shape
            )
            contexts[i] = Context(context.coins, context.memory, shape=of_one)
            sent.append(map_stack(split.units[i], encode)(contexts[i], split.arrays[i]))
        gathered, flags = gather_contents(
            ([content for content, _ in sent], _flag(finite)), axis_name
        )
        workers = _axis.size(axis_name)
        rows = [jnp.zeros((workers, *x.shape), x.dtype) for x in split.arrays]
        after = [context.memory for context in contexts]
        decode = partial(decode_rows, self.codec)
        for i, (_, own), content in zip(filled, sent, gathered, strict=True):
            rows[i] = map_stack(split.units[i], decode, (0, 1), 1)(contexts[i], content)
            after[i] = own
        joined = jax.vmap(split.join)(rows)
        fits = jnp.all(flags == 0) & leaves_finite(joined)
        return Pulled(joined, fits, [each.own for each in after])


def recut(slices: jax.Array, like: jax.Array) -> jax.Array:
    """`[old workers, ...] -> [workers, ...]`; slices follow each other, with zeros at the end."""
    flat = slices.ravel()[: like.size]
    return jnp.pad(flat, (0, like.size - flat.size)).reshape(like.shape)


def resize_memory(
    end: CodedEnd, like: PyTree, old: list[PyTree], new: list[PyTree]
) -> list[PyTree]:
    """The memory of an end for other owners.

    Args:
      end: The end. Memory for rows that a worker sends takes its mean over workers; memory of
        owners is that of their slices.
      like: The shapes of the parameters.
      old: The memory of each unit, leaves `[old workers, ...]`.
      new: The initial memory for the new workers.

    Raises:
      ValueError: If the codec keeps memory that is no array like the unit.
    """
    flat = [[*map(jax.tree.leaves, tree)] for tree in (old, new)]
    if not any(flat[0]):
        return new
    olds, news = ([*zip(*leaves, strict=True)] for leaves in flat)
    resized = [
        _resize_arrays(end, like, [*before], [*after])
        for before, after in zip(olds, news, strict=True)
    ]
    return [
        jax.tree.unflatten(jax.tree.structure(memory), [column[unit] for column in resized])
        for unit, memory in enumerate(new)
    ]


def _resize_arrays(
    end: CodedEnd, like: PyTree, old: list[jax.Array], new: list[jax.Array]
) -> list[jax.Array]:
    """One array of the memory of each unit."""

    def cut(whole: PyTree, workers: int) -> list[jax.Array]:
        rows = jax.tree.map(lambda x: to_slices(x, workers), whole)
        arrays = end.units_of(rows)
        if not end.of_rows:
            return arrays
        return [jnp.broadcast_to(x, (workers, *x.shape)) for x in arrays]

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)
    workers, of_old = len(new[0]), len(old[0])
    for arrays, count in ((old, of_old), (new, workers)):
        expected: Any = jax.eval_shape(lambda tree, count=count: cut(tree, count), zeros)
        if [x.shape for x in arrays] != [x.shape for x in expected]:
            raise ValueError(
                "A codec of `sharded_server` keeps memory that is no array like its slices, so it "
                "cannot be cut for another number of workers. Make a new state with `jaxcomm.init`."
            )
    if end.of_rows:
        old = [mean_over_workers(x, 1, " of `sharded_server`")[0] for x in old]
    rows = end.join_rows(old, jax.tree.map(lambda x: to_slices(x, of_old)[0], zeros))
    whole = jax.tree.map(lambda x, leaf: from_slices(x, leaf.shape), rows, zeros)
    return [x.astype(y.dtype) for x, y in zip(cut(whole, workers), new, strict=True)]
