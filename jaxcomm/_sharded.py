"""Parameters that are sharded over mesh axes which are not axes of workers."""

import contextlib
import contextvars
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcomm._base import PerWorker, PyTree

_SHARDED_OVER: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar(
    "sharded_over", default=()
)


_SPECS: contextvars.ContextVar[Mapping[tuple[str, tuple[int, ...]], PartitionSpec]] = (
    contextvars.ContextVar("specs", default=MappingProxyType({}))
)


@dataclasses.dataclass(frozen=True)
class MixingUpdate:
    """The update function of a gossip method, and the axes of its workers.

    It also takes `shard_axes`, the axes over which its leaves are shards, `share`, by what it
    scales a step, and `applies`, whether the worker's whole step is finite: a worker skips all of a
    step or nothing.
    """

    update: Callable[..., Any]
    axes: tuple[str, ...]
    share: Callable[..., jax.Array]  # `(state, params, weight, present) -> float[]`
    fits: Callable[[PyTree, PyTree, jax.Array], jax.Array]  # `(params, updates, share) -> bool[]`

    def __call__(self, *args: Any, **extra_args: Any) -> Any:
        """Calls the update function, as optax does."""
        return self.update(*args, **extra_args)


def of_one_worker(
    params: PyTree, specs: Sequence[PartitionSpec]
) -> list[tuple[tuple[Any, ...], tuple[int, ...], PartitionSpec]]:
    """Path, shape and spec of each parameter, as a worker sees them.

    Parameters that differ by worker have neither their mark nor their axis of workers there.
    """
    lead = 0
    if isinstance(params, PerWorker):
        ((_, params),) = params.per_worker.items()
        lead = 1
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [
        (path, jax.numpy.shape(x)[lead:], PartitionSpec(*spec[lead:]))
        for (path, x), spec in zip(leaves, specs, strict=False)
    ]


@contextlib.contextmanager
def tracing(
    axes: tuple[str, ...], params: PyTree = (), specs: Sequence[PartitionSpec] = ()
) -> Iterator[None]:
    """States, while a step is traced, which automatic axes shard the parameters.

    Args:
      axes: The axes.
      params: The parameters.
      specs: How they are sharded, leaf by leaf, if known.
    """
    found = {
        (jax.tree_util.keystr(path), shape): spec
        for path, shape, spec in of_one_worker(params, specs)
    }
    tokens = _SHARDED_OVER.set(axes), _SPECS.set(found)
    try:
        yield
    finally:
        _SHARDED_OVER.reset(tokens[0])
        _SPECS.reset(tokens[1])


def require_specs(path: tuple[Any, ...], shape: tuple[int, ...], spec: PartitionSpec) -> None:
    """Raises if the parameter at `path` is sharded, and not as `spec` says."""
    where = jax.tree_util.keystr(path)
    sizes = jax.sharding.get_abstract_mesh().shape
    over = tuple(name for name in automatic_axes() if sizes[name] > 1)
    actual = restricted(_SPECS.get().get((where, shape), PartitionSpec()), over)
    if axes_in(actual) and actual != restricted(spec, over):
        raise ValueError(
            f"`specs` has {spec} at {where or 'the root'}, but the parameter is sharded as "
            f"{actual}, and its shards would be gathered. Pass "
            "`jax.tree.map(lambda x: x.sharding.spec, params)`."
        )


def automatic_axes() -> tuple[str, ...]:
    """The axes that shard the parameters of the traced step, except those that are manual here."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(name for name in _SHARDED_OVER.get() if name not in manual)


def require_shards() -> None:
    """Raises in a step whose parameters are sharded, except on their shards.

    Flat buckets of whole leaves would make the partitioner gather the shards.
    """
    if axes := [*automatic_axes()]:
        raise ValueError(
            f"The parameters are sharded over {axes}, and this transformation would gather them. "
            "Wrap the aggregator or the gossip method: `jaxcomm.shard_local(tx, specs)` with "
            "`specs = jax.tree.map(lambda x: x.sharding.spec, params)`. `sharded_server` does not "
            "support sharded parameters."
        )


def _names_in(entry: Any) -> tuple[str, ...]:
    if isinstance(entry, str):
        return (entry,)
    return tuple(entry) if isinstance(entry, tuple | list) else ()


def axes_in(spec: PartitionSpec) -> tuple[str, ...]:
    """The mesh axes of a spec, in its order."""
    return tuple(name for entry in spec for name in _names_in(entry))


def restricted(spec: PartitionSpec, axes: tuple[str, ...]) -> PartitionSpec:
    """The spec without the axes that are not in `axes`."""

    def kept(entry: Any) -> Any:
        names = tuple(name for name in _names_in(entry) if name in axes)
        return names[0] if len(names) == 1 else names or None

    entries = [*map(kept, spec)]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def joined(first: PartitionSpec, second: PartitionSpec) -> PartitionSpec:
    """A spec that shards each axis as both do; `first` is the outer one."""
    entries = itertools.zip_longest(first, second)
    names = [(*_names_in(one), *_names_in(other)) for one, other in entries]
    return PartitionSpec(*(each[0] if len(each) == 1 else each or None for each in names))


def is_spec(node: object) -> bool:
    """Whether a node of a tree is a spec, which is a leaf although it may be a tuple."""
    return isinstance(node, PartitionSpec)


def all_restricted(specs: PyTree, axes: tuple[str, ...]) -> PyTree:
    """`restricted` for a tree of specs."""
    return jax.tree.map(lambda spec: restricted(spec, axes), specs, is_leaf=is_spec)


def spec_on(mesh: Mesh, x: Any) -> PartitionSpec:
    """How an array, or a `jax.ShapeDtypeStruct`, is sharded over `mesh`."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.shape_tuple != mesh.shape_tuple:
        return PartitionSpec()
    return sharding.spec


def explicit_spec(*shapes: jax.ShapeDtypeStruct) -> PartitionSpec | None:
    """How Explicit axes shard the first of `shapes` that they shard."""
    specs = [x.sharding.spec for x in shapes if isinstance(x.sharding, NamedSharding)]
    return next((spec for spec in specs if any(spec)), None)


def zeros_as(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros that Explicit axes shard as `shape`."""
    zeros, spec = jax.numpy.zeros(shape.shape, shape.dtype), explicit_spec(shape)
    return zeros if spec is None else jax.sharding.reshard(zeros, spec)


def specs_of_state(state: PyTree, base: PyTree, params: PyTree, param_specs: PyTree) -> PyTree:
    """The specs of optimizer state: a moment is sharded as its parameter.

    A moment has the shape of its parameter, after an axis of workers if it has one. Its path ends
    with the path of the parameter, and with the longest one if it ends with several.

    Args:
      state: The state of an optimizer.
      base: The specs of its leaves over the axes of workers.
      params: The parameters.
      param_specs: Their specs.
    """
    like = of_one_worker(params, jax.tree.leaves(param_specs, is_leaf=is_spec))
    like.sort(key=lambda each: len(each[0]))

    def spec(path: tuple[Any, ...], x: Any, own: PartitionSpec) -> PartitionSpec:
        lead = len(own)  # PerWorker leaves have an axis of workers.
        found = [
            param_spec
            for end, shape, param_spec in like
            if x.shape[lead:] == shape and path[len(path) - len(end) :] == end
        ]
        if not found or set(axes_in(found[-1])) & set(axes_in(own)):
            return own  # A leaf that has a slice for each shard is sharded already.
        return PartitionSpec(*own, *found[-1])

    return jax.tree_util.tree_map_with_path(spec, state, base)
