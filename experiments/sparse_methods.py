"""Methods for leaves with sparse gradients, with the capacity for the rows that batches need."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomm
from experiments.methods import BASELINE, Method
from experiments.tasks.task import Batch, Task
from jaxcomm.aggregation._rows import to_cyclic_rows
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sketches import count_sketch
from jaxcomm.compression.sparsifiers import nonzero, nonzero_union

DENSE = "dense"
MARGIN = 1.1
MAX_DENSITY = 0.5  # Above it, sending only the rows of the union saves less than half.


class Capacity(NamedTuple):
    """The capacity of a leaf as fractions of its rows; a server has every n-th row of n workers."""

    worker: float  # for the nonzero rows of one worker
    union: float  # for the rows that are nonzero on any worker
    worker_shard: float  # of one server's rows, for those that are nonzero on one worker
    union_shard: float  # of one server's rows, for those that are nonzero on any worker


class LeafDensity(NamedTuple):
    """The largest measured fractions of nonzero rows of a leaf, as `Capacity` names them."""

    leaf: str
    shape: tuple[int, ...]
    worker: float
    union: float
    worker_shard: float
    union_shard: float

    @property
    def is_sparse(self) -> bool:
        """Whether the leaf has rows, at least half of which are zero on all workers."""
        return len(self.shape) > 1 and 0 < self.union <= MAX_DENSITY

    @property
    def capacity(self) -> Capacity:
        """The measured fractions times `MARGIN`, at most 1."""
        return Capacity(*(min(MARGIN * density, 1.0) for density in self[2:]))


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, such as `"Embed_0/embedding"`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


@jax.jit(static_argnames=("task", "workers"))
def gradients_of_workers(
    params: Any, batch: Batch, *, task: Task, workers: int
) -> dict[str, jax.Array]:
    """The gradient of every leaf on each worker, `[workers, ...]`, by path."""
    parts = jax.tree.map(lambda x: x.reshape(workers, -1, *x.shape[1:]), batch)
    return by_path(jax.vmap(jax.grad(task.loss), in_axes=(None, 0))(params, parts))


@jax.jit
def _densities(gradient: jax.Array) -> jax.Array:
    """The four densities of a leaf `[workers, rows, ...]`, float32[4]."""
    workers, rows = gradient.shape[:2]
    nonzero = jnp.any(gradient.reshape(workers, rows, -1) != 0, axis=2)
    shards = jax.vmap(lambda x: to_cyclic_rows(x, workers))(nonzero)
    parts = nonzero, nonzero.any(axis=0), shards, shards.any(axis=0)
    return jnp.stack([jnp.max(jnp.mean(part, axis=-1)) for part in parts])


def measure_densities(
    task: Task, workers: int, params: Any, batches: Iterable[Batch]
) -> list[LeafDensity]:
    """The largest densities of every leaf over the batches."""
    measured = [
        jax.tree.map(_densities, gradients_of_workers(params, batch, task=task, workers=workers))
        for batch in batches
    ]
    return [
        LeafDensity(path, leaf.shape, *np.max([each[path] for each in measured], axis=0).tolist())
        for path, leaf in by_path(params).items()
    ]


class SparseMethod(NamedTuple):
    """A method, which builds the aggregator of one sparse leaf.

    Attributes:
      sends: A description of what a worker sends, for the README.
      build: `(capacity, *, seed, **options) -> aggregator`.
      grid: Options of `build` that are tuned; see `experiments.methods.Method`. They do not change
        the bytes.
    """

    sends: str
    build: Callable
    grid: Mapping[str, tuple[Any, ...]] = {}


def _with_codec(sends: str, aggregate: Callable, codec: Callable) -> SparseMethod:
    return SparseMethod(
        sends,
        lambda capacity, **options: aggregate(codec(capacity), scope="leaf", **options),
    )


def _s2(sends: str, **sketch: Any) -> SparseMethod:
    return SparseMethod(
        sends,
        lambda capacity, **options: jaxcomm.s2_reducer(
            density=capacity.union, overflow="drop", **sketch, **options
        ),
    )


PEELING = {"sketch_ratio": 1.4, "rows": 3}

CANDIDATES = 1.5
"""Exact values of Sketched SGD per coordinate of the capacity for one worker."""


def _largest(capacity: Capacity, ratio: float) -> dict[str, Any]:
    """The options of sketches whose update has `ratio` coordinates per one of the capacity."""
    kept = min(1.0, ratio * capacity.worker)
    return {"sketch_ratio": capacity.union, "ratio": kept, "momentum": 0.0, "scope": "leaf"}


SPARSE_METHODS = {
    BASELINE: SparseMethod("all rows, summed", lambda capacity, **options: jaxcomm.mean()),
    "mean_bfloat16": SparseMethod(
        "all rows in bfloat16, summed",
        lambda capacity, **options: jaxcomm.mean(wire_dtype="bfloat16"),
    ),
    "all_gather": _with_codec(
        "its rows to all other workers",
        jaxcomm.all_gather_mean,
        lambda capacity: nonzero(density=capacity.worker, overflow="drop"),
    ),
    "union": _with_codec(
        "a bitmap, then the rows of the union, summed (OmniReduce)",
        jaxcomm.all_reduce_mean,
        lambda capacity: nonzero_union(density=capacity.union, overflow="drop"),
    ),
    "sparcml": SparseMethod(
        "its rows to one worker, then sums of two, of four, ... workers (SparCML)",
        lambda capacity, seed: jaxcomm.sparcml(
            density=capacity.worker, union_density=capacity.union
        ),
    ),
    "parallax": SparseMethod(
        "its rows to their servers, and the mean of its server rows to all workers (Parallax)",
        lambda capacity, **options: jaxcomm.two_stage_mean(
            error_feedback(nonzero(density=capacity.worker_shard)),
            mean_codec=error_feedback(nonzero(density=capacity.union_shard)),
            ownership="cyclic",
            scope="leaf",
            **options,
        ),
    ),
    "s2_mean_0.25": _s2(
        "a bitmap and a quarter of a cell per coordinate of the union", sketch_ratio=0.25
    ),
    "s2_mean_1": _s2("a bitmap and one cell per coordinate of the union", sketch_ratio=1),
    "s2_median_1": _s2(
        "the same, with cells in three rows", sketch_ratio=1, rows=3, decode="median"
    ),
    "s2_peel": _s2(
        "a bitmap and 1.4 cells per coordinate, decoded by peeling", decode="peel", **PEELING
    ),
    "s2_peel_8_bits": _s2(
        "a bitmap and 1.4 cells of 8 bits per coordinate, decoded by peeling",
        decode="peel",
        bits=8,
        **PEELING,
    ),
    "count_sketch": _with_codec(
        "a sketch of all coordinates, with one cell per coordinate of the union, without a bitmap",
        jaxcomm.all_reduce_mean,
        lambda capacity: count_sketch(sketch_ratio=capacity.union),
    ),
    "sketched_sgd": SparseMethod(
        "the same in five rows, and the exact values of the largest estimates",
        # With the same number of exact values for every ratio.
        lambda capacity, ratio=1.0, **options: jaxcomm.sketched_sgd(
            candidates=CANDIDATES / ratio, **_largest(capacity, ratio), **options
        ),
        grid={"ratio": ((0.5, 1.0), 0.0, CANDIDATES)},
    ),
    "fetch_sgd": SparseMethod(
        "the same in five rows, which include the residual of earlier steps",
        lambda capacity, ratio=1.0, **options: jaxcomm.fetch_sgd(
            **_largest(capacity, ratio), **options
        ),
        grid={"ratio": ((0.25, 0.5, 1.0, 2.0),)},
    ),
}
"""The methods by name."""


def sparse_method(label: str, capacities: Mapping[str, Capacity]) -> Method:
    """A method for the sparse leaves of a model, with `jaxcomm.mean()` for the other leaves.

    Its aggregator also accepts a dict of the sparse leaves by path.

    Args:
      label: The name of the method, whose options are those of `Method.build`.
      capacities: The capacity for each sparse leaf, by path.
    """

    def build(seed, **options):
        aggregators = {
            path: SPARSE_METHODS[label].build(capacity, seed=seed, **options)
            for path, capacity in capacities.items()
        }

        def labels(tree):
            found = [path if path in aggregators else DENSE for path in by_path(tree)]
            return jax.tree.unflatten(jax.tree.structure(tree), found)

        return optax.partition({**aggregators, DENSE: jaxcomm.mean()}, labels)

    return Method(build, "unbiased", label)
