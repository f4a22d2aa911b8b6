"""Measures the density of each leaf's gradient: of one worker, and of the union of workers."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm
from experiments.cli.errors import ExperimentError
from experiments.methods.sparse import Capacity, path_of
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

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "LeafDensity":
        """The density of a row of a record."""
        return cls(row["leaf"], tuple(row["shape"]), *(row[name] for name in Capacity._fields))

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
        return worker, jaxcomm.gradient_density(gradient, axis_name="data")

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


def describe(leaves: Iterable[LeafDensity]) -> str:
    """Which leaves are sparse, and their capacities."""
    sparse = ", ".join(f"`{leaf.leaf}`" for leaf in leaves if leaf.is_sparse)
    return (
        f"A leaf with rows is sparse if at most {100 * MAX_DENSITY:.0f} % of them are in the union "
        f"of the workers: {sparse}. The capacity is {MARGIN:g} times the measured number."
    )


def predict(leaves: Iterable[LeafDensity], workers: int, part: float = 0.19) -> str:
    """The predicted bytes of a table with one cell per coordinate of the union.

    Args:
      leaves: The densities.
      workers: The number of workers.
      part: The part of the bytes that S2 Reducer sends, as its paper states.
    """
    sparse = [leaf for leaf in leaves if leaf.is_sparse]
    sizes = [math.prod(leaf.shape) for leaf in sparse]
    worker, union, *_ = np.average([leaf.capacity for leaf in sparse], axis=0, weights=sizes)
    # A sum sends its table 2 (n-1)/n times; an all-gather sends n-1 payloads of values.
    ratios = {
        "the sparse all-gather": 2 * union / (workers * worker),
        "the dense all-reduce": union,
    }
    sentences = [
        "[The paper of S2 Reducer](https://arxiv.org/abs/2110.02140) states that it sends "
        f"{100 * (1 - part):.0f} % less. The union of {workers} workers is {union / worker:.2f} "
        "times as dense as the gradient of one worker. The all-gather passes on "
        f"{workers - 1} payloads, and a sum sends its table {2 * (workers - 1) / workers:.2f} "
        "times."
    ]
    sentences += [
        f"Predicted: one cell per coordinate of the union costs {ratio:.2f} times {name}. To send "
        f"{100 * (1 - part):.0f} % less, a table has at most {part / ratio:.2f} cells per "
        f"coordinate, and its estimates have an expected error of {ratio / part:.1f} times the "
        "squared norm."
        for name, ratio in ratios.items()
    ]
    return " ".join(sentences)
