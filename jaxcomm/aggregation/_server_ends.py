"""What workers push to the owners of slices and pull from them, and their memory after a resize.

Each end sends exact values in their dtypes, or payloads of a codec. A tree of rows has leaves
`[workers, ...]`, with one slice per worker; a tree of slices has those of one worker.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm import _axis, _units
from jaxcomm._collectives import exchange_rows, gather_contents
from jaxcomm._contract import AxisName, Codec, Keys, Memory, PyTree
from jaxcomm._units import LARGE, Scope, Unit
from jaxcomm.aggregation._all_gather import local_memory
from jaxcomm.aggregation._coded import (
    AggregatorOptions,
    division,
    restore_memories,
    unit_context,
    weigh,
)
from jaxcomm.aggregation._exchange import Part, all_finite, join_small
from jaxcomm.aggregation._mean import mean_of_rows
from jaxcomm.aggregation._rows import (
    from_rows,
    pull_rows,
    push_rows,
    recut_memory,
    to_slices,
)
from jaxcomm.compression._blockwise import stacked


class Moved(NamedTuple):
    """The result of an exchange on one worker."""

    tree: PyTree  # its slices of the mean; or the rows of all workers, equal on all
    finite: jax.Array  # bool[], whether all workers sent finite values; equal on all after `pull`
    memory: list[PyTree]  # the `Memory.own` of each unit after encoding


def leaves_finite(tree: PyTree) -> jax.Array:
    """Whether no coordinate of any leaf is NaN or infinite, bool[]; small leaves are joined."""
    leaves = [x for x in jax.tree.leaves(tree) if x.size]
    return all_finite(join_small(leaves, LARGE)[0]) if leaves else jnp.array(True)


def _flag(finite: jax.Array) -> jax.Array:
    """float32[], as wide as the values beside it, which therefore stay whole words."""
    return jnp.where(finite, 0.0, 1.0).astype(jnp.float32)


def _one(rows: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[0], rows)


@dataclasses.dataclass(frozen=True)
class End:
    """An end, with a codec of slices, or of several slices of a worker as one unit.

    Attributes:
      axis_name: The axis of the owners.
      codec: The codec of a unit of one worker's slices. Without, values travel in their dtypes, and
        there are neither memory nor PRNG keys.
      scope: Which leaves form a unit. Default: the `scope` of the codec.
      bucket_bytes: The maximum size of a unit of several leaves, in float32 bytes.
      of_rows: Whether units are rows of all workers, which are pushed, each with separate memory.
    """

    axis_name: AxisName
    codec: Codec | None
    scope: Scope | None
    bucket_bytes: int | None
    of_rows: bool

    def _divide(self, slices: PyTree) -> _units.Split:
        assert self.codec is not None
        options: AggregatorOptions = {"scope": self.scope, "bucket_bytes": self.bucket_bytes}
        divided = division(options, self.codec)
        return _units.split(slices, *divided, layout=self.codec.layout, stacks=True)

    def _cut(self, rows: PyTree) -> list[jax.Array]:
        return jax.vmap(lambda slices: self._divide(slices).arrays)(rows)

    def key_count(self, slices: PyTree) -> int:
        """The number of PRNG keys for the units of slices."""
        if self.codec is None:
            return 0
        return 1 + max(max(unit.key_numbers) for unit in self._divide(slices).units)

    def _codec_of(self, unit: Unit) -> Codec:
        assert self.codec is not None
        codec = stacked(self.codec) if unit.form == "stacked" else self.codec

        def init(x: jax.Array) -> Memory:
            return Memory(local_memory(codec, x, "sharded_server", "the owner of a slice"))

        return dataclasses.replace(codec, init=jax.vmap(init) if self.of_rows else init)

    def init(self, tree: PyTree) -> list[PyTree]:
        """The first `Memory.own` of each unit of what is pushed or pulled."""
        if self.codec is None or not jax.tree.leaves(tree):
            return []
        split = self._divide(_one(tree) if self.of_rows else tree)
        arrays = self._cut(tree) if self.of_rows else split.arrays
        return [
            self._codec_of(unit).init(x).own for unit, x in zip(split.units, arrays, strict=True)
        ]

    def _through(
        self,
        exchange: Callable[..., tuple[list[Part], PyTree]],
        units: list[Unit],
        arrays: list[jax.Array],
        keys: Keys,
        memory: list[PyTree],
        flags: jax.Array,
    ) -> tuple[list[jax.Array], jax.Array, list[PyTree]]:
        """The results of an exchange, which gets the units that are not empty."""
        before = restore_memories(self._codec_of, units, arrays, memory, [()] * len(units))
        parts = [
            Part(self._codec_of(unit), unit_context(keys, unit, own, x), x, unit, own, x)
            for unit, own, x in zip(units, before, arrays, strict=True)
        ]
        filled = [number for number, x in enumerate(arrays) if x.size]
        moved, flags = exchange(self.axis_name, [parts[i] for i in filled], flags)
        for i, part in zip(filled, moved, strict=True):
            parts[i] = part
        after = [part.memory.own for part in parts]
        return [part.mean for part in parts], jnp.all(flags == 0), after

    def push(
        self,
        rows: PyTree,
        keys: Keys,
        memory: list[PyTree],
        weight: jax.Array | float | None = None,
    ) -> Moved:
        """Sends each owner its rows; the owner averages in at least float32."""

        def to_each(x: jax.Array) -> jax.Array:
            return jnp.broadcast_to(x, (_axis.size(self.axis_name),))

        if self.codec is not None:
            split, arrays = self._divide(_one(rows)), self._cut(rows)
            if weight is not None:
                arrays = [*map(weigh(self.axis_name, weight, arrays), arrays)]
            flags = to_each(_flag(leaves_finite(arrays)))
            means, finite, after = self._through(
                push_rows, split.units, arrays, keys, memory, flags
            )
            return Moved(split.join(means), finite, after)
        finite = leaves_finite(rows)
        if weight is not None:
            finite = jnp.isfinite(weight) & (finite | (weight == 0))
        beside = jax.tree.map(to_each, (_flag(finite), weight))
        with jax.named_scope("rows"):
            received, (flags, weights) = exchange_rows((rows, beside), self.axis_name)
        means = jax.tree.map(lambda x: mean_of_rows(x, weights), received)
        return Moved(means, jnp.all(flags == 0), [])

    def pull(self, slices: PyTree, keys: Keys, memory: list[PyTree], finite: jax.Array) -> Moved:
        """Sends this worker's slices to all workers, and whether they are finite."""
        if self.codec is None:
            with jax.named_scope("slices"):
                rows, flags = gather_contents((slices, _flag(finite)), self.axis_name)
            return Moved(rows, jnp.all(flags == 0), [])
        arrays, units, join = self._divide(slices)
        gathered, finite, after = self._through(
            pull_rows, units, arrays, keys, memory, _flag(finite)
        )
        workers = _axis.size(self.axis_name)
        whole = [x if x.size else jnp.zeros((workers, *x.shape), x.dtype) for x in gathered]
        rows = jax.vmap(join)(whole)
        return Moved(rows, finite & leaves_finite(rows), after)

    def resize(self, like: PyTree, old: list[PyTree], new: list[PyTree]) -> list[PyTree]:
        """The memory for other owners of parameters of the shapes of `like`."""
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)

        def rows_of(tree: PyTree, workers: int) -> PyTree:
            return jax.tree.map(lambda x: to_slices(x, workers), tree)

        def join(arrays: list[jax.Array], workers: int) -> PyTree:
            rows = jax.vmap(self._divide(_one(rows_of(zeros, workers))).join)(arrays)
            return jax.tree.map(lambda x, leaf: from_rows(x, leaf.shape), rows, zeros)

        return recut_memory(
            lambda whole, workers: self._cut(rows_of(whole, workers)),
            join,
            zeros,
            old,
            new,
            of_rows=self.of_rows,
            user="sharded_server",
        )
