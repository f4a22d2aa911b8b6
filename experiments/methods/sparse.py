"""The methods for sparse leaves, built from measured densities."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax

import jaxcomm
from experiments.methods import BASELINE
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sketches import count_sketch, s2_codes, s2_sketch
from jaxcomm.compression.sparsifiers import nonzero, nonzero_union

DENSE = "dense"


class Capacity(NamedTuple):
    """The capacity for a leaf, as fractions of its rows.

    A server has every n-th row of n workers.
    """

    worker: float  # for the nonzero rows of one worker
    union: float  # for the rows that are nonzero on any worker
    worker_shard: float  # of one server's rows, for those that are nonzero on one worker
    union_shard: float  # of one server's rows, for those that are nonzero on any worker


class SparseMethod(NamedTuple):
    """A method, which builds the aggregator of one sparse leaf.

    Attributes:
      build: `(capacity, *, seed, diagnostics, **options) -> aggregator`.
      sends: A description of what a worker sends, for the README.
      codec: `capacity -> codec`, if a single codec encodes and decodes.
      grid: Options of `build` that are tuned; see `experiments.methods.Method`. They do not change
        the bytes.
    """

    build: Callable[..., optax.GradientTransformationExtraArgs]
    sends: str
    codec: Callable[[Capacity], jaxcomm.Codec] | None = None
    grid: Mapping[str, tuple[Any, ...]] = {}


def _codec_method(
    aggregate: Callable[..., Any], codec: Callable[[Capacity], jaxcomm.Codec], sends: str
) -> SparseMethod:
    return SparseMethod(
        lambda capacity, **options: aggregate(codec(capacity), scope="leaf", **options),
        sends,
        codec,
    )


def _s2(sends: str, **sketch: Any) -> SparseMethod:
    return SparseMethod(
        lambda capacity, **options: jaxcomm.s2_reducer(
            density=capacity.union, overflow="drop", **sketch, **options
        ),
        sends,
        lambda capacity: s2_sketch(density=capacity.union, **sketch),
    )


CANDIDATES = 1.5
"""Exact values of Sketched SGD per coordinate of the capacity for one worker."""


def _sketched_sgd(
    capacity: Capacity, *, ratio: float = 1.0, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """With the same number of exact values for every `ratio`."""
    return jaxcomm.sketched_sgd(
        sketch_ratio=capacity.union,
        ratio=min(1.0, ratio * capacity.worker),
        candidates=CANDIDATES / ratio,
        momentum=0.0,
        scope="leaf",
        **options,
    )


def _fetch_sgd(
    capacity: Capacity, *, ratio: float = 1.0, **options: Any
) -> optax.GradientTransformationExtraArgs:
    return jaxcomm.fetch_sgd(
        sketch_ratio=capacity.union,
        ratio=min(1.0, ratio * capacity.worker),
        momentum=0.0,
        scope="leaf",
        **options,
    )


_PEELING = {"sketch_ratio": 1.4, "rows": 3}

SPARSE_METHODS: dict[str, SparseMethod] = {
    BASELINE: SparseMethod(lambda capacity, **options: jaxcomm.mean(), "all rows, summed"),
    "mean_bfloat16": SparseMethod(
        lambda capacity, **options: jaxcomm.mean(wire_dtype="bfloat16"),
        "all rows in bfloat16, summed",
    ),
    "all_gather": _codec_method(
        jaxcomm.all_gather_mean,
        lambda capacity: nonzero(density=capacity.worker, overflow="drop"),
        "its rows to all other workers",
    ),
    "union": _codec_method(
        jaxcomm.all_reduce_mean,
        lambda capacity: nonzero_union(density=capacity.union, overflow="drop"),
        "a bitmap, then the rows of the union, summed (OmniReduce)",
    ),
    "sparcml": SparseMethod(
        lambda capacity, *, seed, diagnostics: jaxcomm.sparcml(
            density=capacity.worker, union_density=capacity.union, diagnostics=diagnostics
        ),
        "its rows to one worker, then sums of two, of four, ... workers (SparCML)",
    ),
    "parallax": SparseMethod(
        lambda capacity, **options: jaxcomm.two_stage_mean(
            error_feedback(nonzero(density=capacity.worker_shard)),
            mean_codec=error_feedback(nonzero(density=capacity.union_shard)),
            ownership="cyclic",
            scope="leaf",
            **options,
        ),
        "its rows to their servers, and the mean of its server rows to all workers (Parallax)",
    ),
    "s2_mean_0.25": _s2(
        "a bitmap and a quarter of a cell per coordinate of the union", sketch_ratio=0.25
    ),
    "s2_mean_1": _s2("a bitmap and one cell per coordinate of the union", sketch_ratio=1),
    "s2_median_1": _s2(
        "the same, with cells in three rows", sketch_ratio=1, rows=3, decode="median"
    ),
    "s2_peel": _s2(
        "a bitmap and 1.4 cells per coordinate, decoded by peeling", decode="peel", **_PEELING
    ),
    "s2_peel_8_bits": SparseMethod(
        lambda capacity, **options: jaxcomm.s2_reducer(
            density=capacity.union, decode="peel", bits=8, overflow="drop", **_PEELING, **options
        ),
        "a bitmap and 1.4 cells of 8 bits per coordinate, decoded by peeling",
        lambda capacity: s2_codes(density=capacity.union, **_PEELING),
    ),
    "count_sketch": _codec_method(
        jaxcomm.all_reduce_mean,
        lambda capacity: count_sketch(sketch_ratio=capacity.union),
        "a sketch of all coordinates, with one cell per coordinate of the union, without a bitmap",
    ),
    "sketched_sgd": SparseMethod(
        _sketched_sgd,
        "the same in five rows, and the exact values of the largest estimates",
        grid={"ratio": ((0.5, 1.0), 0.0, CANDIDATES)},
    ),
    "fetch_sgd": SparseMethod(
        _fetch_sgd,
        "the same in five rows, which include the residual of earlier steps",
        grid={"ratio": ((0.25, 0.5, 1.0, 2.0),)},
    ),
}
"""The methods by name."""


class SparseVariant(NamedTuple):
    """A method for the sparse leaves of a model, with `jaxcomm.mean()` for the other leaves.

    Attributes:
      label: The name of the method.
      capacities: The capacity for each sparse leaf, by path.
      has_momentum: False.
      is_vote: False.
      stage: None, since each step sends the same number of bytes.
      options: The tuned options of the method.
    """

    label: str
    capacities: Mapping[str, Capacity]
    has_momentum: bool = False
    is_vote: bool = False
    stage: None = None
    options: Mapping[str, Any] = {}

    @property
    def grid(self) -> Mapping[str, tuple[Any, ...]]:
        """The options that are tuned."""
        return SPARSE_METHODS[self.label].grid

    def tuned(self, **options: Any) -> "SparseVariant":
        """The same method with other options of its grid."""
        return self._replace(options=options)

    def _partition(self, **options: Any) -> optax.GradientTransformationExtraArgs:
        build = SPARSE_METHODS[self.label].build
        transformations = {
            path: build(capacity, **self.options, **options)
            for path, capacity in self.capacities.items()
        }

        def labels(tree: Any) -> Any:
            return jax.tree_util.tree_map_with_path(
                lambda path, leaf: name if (name := path_of(path)) in self.capacities else DENSE,
                tree,
            )

        return optax.partition({**transformations, DENSE: jaxcomm.mean()}, labels)

    def build(self, seed: int | jax.Array) -> optax.GradientTransformationExtraArgs:
        """The aggregator of all leaves; it also accepts a dict of the sparse leaves by path."""
        return self._partition(seed=seed, diagnostics=False)

    def build_with_diagnostics(
        self, seed: int | jax.Array
    ) -> optax.GradientTransformationExtraArgs:
        """The same aggregator, which reports diagnostics."""
        return self._partition(seed=seed, diagnostics=True)


def path_of(path: tuple[Any, ...]) -> str:
    """The path as text, e.g. `"Embed_0/embedding"`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
