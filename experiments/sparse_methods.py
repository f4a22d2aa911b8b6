"""What sends sparse leaves: one row a method, built from measured densities."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import optax

import jaxcomm
from experiments.errors import ExperimentError
from experiments.methods import expand
from experiments.summary import BASELINE
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sketches import count_sketch, s2_codes, s2_sketch
from jaxcomm.compression.sparsifiers import nonzero, nonzero_union

GATHERED = "all_gather"
DENSE = "dense"


class Room(NamedTuple):
    """For what part of a leaf's rows there is room."""

    own: float  # of those that are not zero on one worker
    union: float  # of those that are not zero on some worker
    own_share: float  # on one worker, of every n-th row of n, which a server of rows has
    union_share: float  # on some worker, likewise


class SparseMethod(NamedTuple):
    """An aggregator of one sparse leaf, to be built.

    Attributes:
      build: `(room, *, seed, info) -> aggregator`.
      sends: What a worker sends, for the README.
      codec: `room -> codec`, where one codec is all there is to encoding and decoding.
    """

    build: Callable[..., optax.GradientTransformationExtraArgs]
    sends: str
    codec: Callable[[Room], jaxcomm.Codec] | None = None


def _carried(
    aggregate: Callable[..., Any], codec: Callable[[Room], jaxcomm.Codec], sends: str
) -> SparseMethod:
    return SparseMethod(
        lambda room, **options: aggregate("data", codec(room), scope="leaf", **options),
        sends,
        codec,
    )


def _s2(sends: str, **sketch: Any) -> SparseMethod:
    return SparseMethod(
        lambda room, **options: jaxcomm.s2_reducer(
            density=room.union, overflow="drop", **sketch, **options
        ),
        sends,
        lambda room: s2_sketch(density=room.union, **sketch),
    )


_PEELING = {"ratio": 1.4, "rows": 3}

SPARSE_METHODS: dict[str, SparseMethod] = {
    BASELINE: SparseMethod(lambda room, **options: jaxcomm.mean(), "all rows, summed"),
    GATHERED: _carried(
        jaxcomm.all_gather_mean,
        lambda room: nonzero(density=room.own, overflow="drop"),
        "its own rows, to all others",
    ),
    "union": _carried(
        jaxcomm.all_reduce_mean,
        lambda room: nonzero_union(density=room.union, overflow="drop"),
        "a bitmap, then the rows of the union, summed (OmniReduce)",
    ),
    "sparcml": SparseMethod(
        lambda room, *, seed, diagnostics: jaxcomm.sparcml(
            density=room.own, union_density=room.union, diagnostics=diagnostics
        ),
        "its own rows to one other, the sums of two, of four, ... (SparCML)",
    ),
    "parallax": SparseMethod(
        lambda room, **options: jaxcomm.two_stage_mean(
            "data",
            error_feedback(nonzero(density=room.own_share)),
            mean_codec=error_feedback(nonzero(density=room.union_share)),
            layout="cyclic",
            scope="leaf",
            **options,
        ),
        "its own rows to their servers, and their means to all (Parallax)",
    ),
    "s2_mean_0.25": _s2("a bitmap and a quarter of a cell a coordinate of the union", ratio=0.25),
    "s2_mean_1": _s2("a bitmap and a cell a coordinate of the union", ratio=1),
    "s2_median_1": _s2("the same, its cells in three rows", ratio=1, rows=3, decode="median"),
    "s2_peel": _s2("a bitmap and 1.4 cells a coordinate, solved for", decode="peel", **_PEELING),
    "s2_peel_8_bits": SparseMethod(
        lambda room, **options: jaxcomm.s2_reducer(
            density=room.union, decode="peel", bits=8, overflow="drop", **_PEELING, **options
        ),
        "a bitmap and 1.4 cells of 8 bits a coordinate, solved for",
        lambda room: s2_codes(density=room.union, **_PEELING),
    ),
    "count_sketch": _carried(
        jaxcomm.all_reduce_mean,
        lambda room: count_sketch(ratio=room.union),
        "as many cells as the union has coordinates, of all coordinates, without a bitmap",
    ),
    "sketched_sgd": SparseMethod(
        lambda room, **options: jaxcomm.sketched_sgd(
            sketch_ratio=room.union,
            ratio=room.own,
            candidates=1.5,
            momentum=0.0,
            scope="leaf",
            **options,
        ),
        "the same in five rows, and exactly the coordinates found to be largest",
    ),
    "fetch_sgd": SparseMethod(
        lambda room, **options: jaxcomm.fetch_sgd(
            sketch_ratio=room.union, ratio=room.own, momentum=0.0, scope="leaf", **options
        ),
        "the same in five rows, which also hold what was not yet updated",
    ),
}
"""Another method is another row; `mean` and `all_gather` are what the others are held against."""

S2 = tuple(name for name in SPARSE_METHODS if name.startswith("s2_"))
"""The variants of S2 Reducer."""


class SparseVariant(NamedTuple):
    """A method for the sparse leaves of a model, beside `jaxcomm.mean()` for the others.

    Attributes:
      label: The name of the method.
      rooms: The room of each sparse leaf, by its path.
      has_momentum: False.
      stage: None: each step sends the same.
    """

    label: str
    rooms: Mapping[str, Room]
    has_momentum: bool = False
    stage: None = None

    def _partition(self, **options: Any) -> optax.GradientTransformationExtraArgs:
        build = SPARSE_METHODS[self.label].build
        transformations = {path: build(room, **options) for path, room in self.rooms.items()}

        def labels(tree: Any) -> Any:
            return jax.tree_util.tree_map_with_path(
                lambda path, leaf: name if (name := path_of(path)) in self.rooms else DENSE, tree
            )

        return optax.partition({**transformations, DENSE: jaxcomm.mean()}, labels)

    def build(self, seed: int | jax.Array) -> optax.GradientTransformationExtraArgs:
        """The aggregator of all leaves; of the sparse leaves alone, by their paths, as well."""
        return self._partition(seed=seed, diagnostics=False)

    def observed(self, seed: int | jax.Array) -> optax.GradientTransformationExtraArgs:
        """The same, which tells of its steps."""
        return self._partition(seed=seed, diagnostics=True)


def path_of(path: tuple[Any, ...]) -> str:
    """`"Embed_0/embedding"` and the like."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def make_sparse_variants(names: Iterable[str], rooms: Mapping[str, Room]) -> list[SparseVariant]:
    """The methods, each once, with every one there is in place of `all`.

    Raises:
      ExperimentError: If there is no such method.
    """
    labels = expand(names, tuple(SPARSE_METHODS))
    for label in labels:
        if label not in SPARSE_METHODS:
            raise ExperimentError(
                f"there is no sparse method {label!r}; there are {', '.join(SPARSE_METHODS)}."
            )
    return [SparseVariant(label, rooms) for label in labels]
