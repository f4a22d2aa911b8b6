"""The state of `sharded_server` for other owners: slices are joined and cut again."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm._contract import PyTree
from jaxcomm._resize import mean_over_workers
from jaxcomm.aggregation._rows import from_slices, to_slices
from jaxcomm.aggregation._server_ends import CodedEnd


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
