"""Measures the density of each leaf's gradient: of one worker, and of the union of workers."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

import jaxcomm
from experiments.cli.errors import ExperimentError
from experiments.methods.sparse import Capacity, path_of
from experiments.study import table
from experiments.tasks.task import Batch, Task
from jaxcomm.aggregation._rows import to_cyclic_rows

MARGIN = 1.1
MAX_DENSITY = 0.5  # Above it, sending only the rows of the union saves less than half.


class LeafDensity(NamedTuple):
    """The largest measured fractions of nonzero rows of a leaf."""

    leaf: str
    shape: tuple[int, ...]
    worker: float  # on one worker
    union: float  # on any worker
    worker_shard: float  # on one worker, of the rows of one server, every n-th for n workers
    union_shard: float  # on any worker, of the rows of one server

    @property
    def is_sparse(self) -> bool:
        """Whether the leaf has rows, at least half of which are zero on all workers."""
        return len(self.shape) > 1 and 0 < self.union <= MAX_DENSITY

    @property
    def capacity(self) -> Capacity:
        """The measured fractions times `MARGIN`, at most 1."""
        seen = (self.worker, self.union, self.worker_shard, self.union_shard)
        return Capacity(*(min(MARGIN * density, 1.0) for density in seen))


@functools.cache
def make_gradients(task: Task, workers: int) -> Callable[[Any, Batch], Any]:
    """`(params, batch) -> gradients` of each worker, with leaves `[workers, ...]`."""

    @jax.jit
    def gradients(params: Any, batch: Batch) -> Any:
        parts = jax.tree.map(lambda x: x.reshape(workers, -1, *x.shape[1:]), batch)
        return jax.vmap(jax.grad(task.loss), in_axes=(None, 0))(params, parts)

    return gradients


@jax.jit
def _densities(gradients: Any) -> Any:
    """The four densities of `LeafDensity` of each leaf `[workers, ...]`, float32[4]."""

    def worker_and_union(gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        worker = jaxcomm.gradient_density(gradient)
        return worker, jaxcomm.gradient_density(gradient, "data")

    def of_leaf(gradient: jax.Array) -> jax.Array:
        workers = gradient.shape[0]
        gradient = gradient if gradient.ndim > 1 else gradient[:, None]
        densities = jax.vmap(worker_and_union, axis_name="data")(gradient)
        shares = jax.vmap(lambda x: to_cyclic_rows(x, workers))(gradient)
        shard_densities = jax.vmap(jax.vmap(worker_and_union), axis_name="data")(shares)
        return jnp.stack([jnp.max(density) for density in (*densities, *shard_densities)])

    return jax.tree.map(of_leaf, gradients)


def measure_densities(
    task: Task, workers: int, params: Any, batches: Iterable[Batch]
) -> list[LeafDensity]:
    """The largest densities of every leaf over the batches.

    Raises:
      ExperimentError: If no leaf is sparse, or the batch cannot be split.
    """
    gradients, seen = make_gradients(task, workers), []
    for batch in batches:
        if len(batch[1]) % workers:
            raise ExperimentError(f"--batch {len(batch[1])} is not divisible by {workers} workers.")
        seen.append(jax.device_get(_densities(gradients(params, batch))))
    largest = jax.tree.map(lambda *each: np.max(each, axis=0), *seen)
    shapes = jax.tree.leaves(jax.tree.map(jnp.shape, params), is_leaf=lambda x: type(x) is tuple)
    leaves = [
        LeafDensity(path_of(path), shape, *map(float, density))
        for (path, density), shape in zip(
            jax.tree_util.tree_leaves_with_path(largest), shapes, strict=True
        )
    ]
    if not any(leaf.is_sparse for leaf in leaves):
        raise ExperimentError(
            "no leaf is sparse: more than half of the rows of each leaf are nonzero. Use a smaller "
            "--batch or a larger --vocabulary."
        )
    return leaves


HEADINGS = (
    "leaf",
    "shape",
    "one worker, %",
    "union, %",
    "one worker, rows of a server, %",
    "union, rows of a server, %",
    "sent as",
)


def _cells(leaf: LeafDensity) -> tuple[str, ...]:
    seen = (leaf.worker, leaf.union, leaf.worker_shard, leaf.union_shard)
    shape = " x ".join(map(str, leaf.shape)) or "scalar"
    sent_as = "sparse" if leaf.is_sparse else "dense"
    return (leaf.leaf, shape, *(f"{100 * part:.2f}" for part in seen), sent_as)


def to_table(leaves: Iterable[LeafDensity]) -> Table:
    """For the terminal."""
    return table.to_rich(HEADINGS, map(_cells, leaves))


def to_markdown(leaves: Iterable[LeafDensity]) -> str:
    """For a README."""
    return table.to_markdown(HEADINGS, map(_cells, leaves))
