"""Weights in slices: gathered whole for the loss, and their gradients back in slices (ZeRO-3)."""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxcomm import _axis, _noise
from jaxcomm._collectives import gather_contents
from jaxcomm._contract import AxisName, Codec, Coins, PyTree
from jaxcomm._mesh import axes_in
from jaxcomm._require import checked, require_axis_name, require_codec
from jaxcomm._units import Scope, require_floating
from jaxcomm.aggregation._coded import AggregatorOptions, division
from jaxcomm.aggregation._mean import mean
from jaxcomm.aggregation._server_ends import CodedEnd, leaves_finite, push_exactly

Codecs = Codec | Mapping[str, Codec] | None
Gather = Callable[..., PyTree]


@dataclasses.dataclass(frozen=True)
class _Level:
    """The exchanges over one axis, or over several as one: slices to all, and rows to their owners.

    Attributes:
      axis_name: The axis.
      workers: All axes of the workers, whose draws are independent.
      push: The end of gradients; `None` if they travel exactly.
      pull: The end of weights.
    """

    axis_name: AxisName
    workers: AxisName
    push: CodedEnd | None
    pull: CodedEnd | None

    def _coins(self, end: CodedEnd, tree: PyTree, key: jax.Array, direction: int) -> Coins:
        # `key` is placed by the paths of the leaves, and the same place again would undo that.
        place = _noise.placed_key(key, ("level", *_axis.names(self.axis_name)), ())
        return _noise.coins_of_units(
            place, jnp.uint32(direction), end.coins(tree), _axis.index(self.workers)
        )

    def gather(self, slices: PyTree, key: Any) -> PyTree:
        """The slices of all workers over the axis, on a new leading dimension of each leaf."""
        if self.pull is None:
            return gather_contents(slices, self.axis_name)
        coins, memory = self._coins(self.pull, slices, key, 0), _stateless(self.pull, slices)
        pulled = self.pull.pull(self.axis_name, slices, coins, memory, leaves_finite(slices))
        return jax.tree.map(lambda x: jnp.where(pulled.finite, x, jnp.nan), pulled.rows)

    def scatter(self, rows: PyTree, key: Any) -> PyTree:
        """The mean over the axis of the row that this worker owns; all NaN if any row has a NaN."""
        if self.push is None:
            pushed = push_exactly(self.axis_name, rows, None)
        else:
            coins, memory = self._coins(self.push, rows, key, 1), _stateless(self.push, rows)
            pushed = self.push.push(self.axis_name, rows, coins, memory, None)
        return jax.tree.map(lambda x: jnp.where(pushed.finite, x, jnp.nan), pushed.means)


def _stateless(end: CodedEnd, tree: PyTree) -> list[PyTree]:
    if jax.tree.leaves(jax.eval_shape(end.codec.init, jnp.zeros(1))):
        raise ValueError(
            "`weight_gather` takes codecs without memory, since a loss has no state. For feedback "
            "use `jaxcomm.sharded_server`, which keeps it beside the optimizer state."
        )
    return end.init(tree)


def _only_once(function: Callable[[PyTree], PyTree]) -> Callable[[PyTree], PyTree]:
    """The function; its derivative raises, since messages of words have none and it would be 0."""

    def refuse(*_: Any) -> Any:
        raise ValueError(
            "The gradient of `weight_gather` has no derivative: take second derivatives of a loss "
            "of whole weights, outside of `jax.shard_map`."
        )

    once = jax.custom_vjp(function)
    once.defvjp(refuse, refuse)
    return once


def _levels(
    axis_name: AxisName, push: Codecs, pull: Codecs, scope: Scope | None, bucket_bytes: int | None
) -> list[_Level]:
    """One level for all axes; or, if codecs are given by axis, one per axis, outermost first."""
    options: AggregatorOptions = {"scope": scope, "bucket_bytes": bucket_bytes}
    names = _axis.names(axis_name)
    by_axis = isinstance(push, Mapping) or isinstance(pull, Mapping)

    def end(codecs: Codecs, option: str, axis: AxisName, *, of_rows: bool) -> CodedEnd | None:
        if isinstance(codecs, Mapping):
            if unknown := [name for name in codecs if name not in names]:
                raise ValueError(f"`{option}` names {unknown}, but `axis_name` is {axis_name!r}.")
            codecs = codecs.get(str(axis))
        if codecs is None:
            return None
        require_codec(codecs, option)
        return CodedEnd(codecs, *division(options, codecs), of_rows)

    return [
        _Level(
            axis,
            axis_name,
            push=end(push, "push", axis, of_rows=True),
            pull=end(pull, "pull", axis, of_rows=False),
        )
        for axis in (names if by_axis else (axis_name,))
    ]


def sliced_dimension(spec: PartitionSpec, axis_name: AxisName, where: str = "") -> int | None:
    """The dimension that a spec shards over the workers; `None` if the leaf is whole.

    Raises:
      ValueError: If the spec names other axes, or not all of the workers' in their order.
    """
    names, found = _axis.names(axis_name), axes_in(spec)
    if not found:
        return None
    for dimension, entry in enumerate(spec):
        if found == names and axes_in(PartitionSpec(entry)) == names:
            return dimension
    raise ValueError(
        f"The spec{where}, {spec}, must shard one dimension over all axes of the workers, "
        f"{axis_name!r}, in this order, or none."
    )


def _dimensions(specs: PyTree, like: PyTree, axis_name: AxisName) -> list[int | None]:
    """The sliced dimension of each leaf of `like`, of which `specs` is a prefix."""
    found: list[int | None] = []

    def add(path: tuple[Any, ...], spec: PartitionSpec, part: PyTree) -> None:
        where = jax.tree_util.keystr(path) or "the root"
        dimension = sliced_dimension(spec, axis_name, f" at {where}")
        for x in jax.tree.leaves(part):
            if dimension is not None and dimension >= x.ndim:
                raise ValueError(
                    f"The spec at {where}, {spec}, slices dimension {dimension} of an array "
                    f"{list(x.shape)}, which does not have it. Within a layer, pass the spec of "
                    "its slices."
                )
            found.append(dimension)

    jax.tree_util.tree_map_with_path(add, specs, like)
    return found


def _joined(rows: jax.Array, levels: int, dimension: int) -> jax.Array:
    """The whole leaf of its slices, `[innermost axis, ..., outermost axis, *slice]`."""
    order = [*reversed(range(levels)), *range(levels, rows.ndim)]
    shape = rows.shape[levels:]
    slices = rows.transpose(order).reshape(math.prod(rows.shape[:levels]), *shape)
    whole = (*shape[:dimension], len(slices) * shape[dimension], *shape[dimension + 1 :])
    return jnp.moveaxis(slices, 0, dimension).reshape(whole)


def _parted(whole: jax.Array, sizes: tuple[int, ...], dimension: int) -> jax.Array:
    """The inverse of `_joined`; `sizes` are those of the axes, outermost first."""
    shape, workers = whole.shape, math.prod(sizes)
    parts = (*shape[:dimension], workers, shape[dimension] // workers, *shape[dimension + 1 :])
    slices = jnp.moveaxis(whole.reshape(parts), dimension, 0)
    rows = slices.reshape(*sizes, *slices.shape[1:])
    return rows.transpose([*reversed(range(len(sizes))), *range(len(sizes), rows.ndim)])


@checked
def weight_gather(
    specs: PyTree,
    *,
    axis_name: AxisName = "data",
    push: Codecs = None,
    pull: Codecs = None,
    scope: Scope | None = None,
    bucket_bytes: int | None = None,
) -> Gather:
    r"""Makes a function that gathers sliced weights, and whose gradient is the mean in slices.

    .. math:: x = (\mathrm{pull}(x_1), \ldots, \mathrm{pull}(x_n)), \qquad
              \frac{\partial}{\partial x_k} := \frac{1}{n} \sum_i
              \mathrm{push}(\nabla f_i(x))_k

    Use it inside `jax.shard_map` in a loss, for the weights of a layer or of the whole model. The
    gradient with respect to the slices needs no aggregator. The backward pass keeps the gathered
    weights; under :func:`jax.checkpoint` it gathers them again.

    A gather sends n - 1 payloads of a worker's slices to n - 1 workers. Its backward pass sends one
    payload of a slice to each other worker, with a flag of 4 bytes that reports non-finite values.
    Each is one collective for all leaves of the call. Leaves that no axis slices are not sent.
    Their gradients are averaged exactly, 4 bytes per coordinate in an all-reduce (2 of 16 bits).

    Args:
      specs: How weights are sharded, a tree of `PartitionSpec` or a prefix of it. A spec names all
        axes of `axis_name` in one dimension, which n divides, or none.
      axis_name: The mesh axis, or axes, of the workers.
      push: The codec of gradients, without memory; each slice has separate statistics. A mapping
        from axes to codecs makes one exchange per axis: gradients are reduced over the last axis
        first, and over the first axis, with the slowest links, last. Default: exact.
      pull: The codec of weights, in the same way; they are gathered over the first axis first.
      scope: Which slices of a call share statistics: those of each `"leaf"`, or of a `"bucket"`.
        Default: the `scope` of each codec.
      bucket_bytes: The maximum size of a bucket of slices in float32 bytes. Default: 32 MiB.

    Returns:
      `gather(slices, key=None) -> whole`, typed as varying by worker. With a codec, `key` is a
      typed threefry key that is equal on all workers and different in each step and layer. If a
      gradient of a call is not finite on any worker, the gradients of its slices are NaN on all.

    Raises:
      ValueError: If an axis is named twice or a codec is for another axis; when called, if a spec
        names other axes or does not fit a leaf, a codec has memory, a leaf is not floating-point,
        or a key is missing; if the gradient is differentiated again.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> from jax.sharding import PartitionSpec
      >>> gather = jaxcomm.aggregation.weight_gather(PartitionSpec("data"))
      >>> def loss(w, x):
      ...     return jnp.sum(gather(w)) * x
      >>> weights, x = jnp.float32([[1], [2]]), jnp.float32([3, 5])  # One row per worker.
      >>> print(jax.vmap(jax.grad(loss), axis_name="data")(weights, x).ravel())
      [4. 4.]

    References:
      Rajbhandari et al., `ZeRO: Memory Optimizations Toward Training Trillion Parameter Models
      <https://arxiv.org/abs/1910.02054>`_, 2020. Wang et al., `ZeRO++: Extremely Efficient
      Collective Communication for Giant Model Training <https://arxiv.org/abs/2306.10209>`_, 2023:
      `pull` is its quantized weights, `push` by axis its quantized gradients. Differences: no
      second copy of weights within a node; any number of workers per axis.
    """
    require_axis_name(axis_name)
    levels = _levels(axis_name, push, pull, scope, bucket_bytes)
    has_codec = any(level.push or level.pull for level in levels)

    def exchanged(parts: list[jax.Array], dimensions: list[int], key: Any) -> list[jax.Array]:
        if not parts:
            return []
        sizes = tuple(_axis.size(level.axis_name) for level in levels)

        def whole_of(slices: list[jax.Array], key: Any) -> list[jax.Array]:
            rows = slices
            for level in levels:
                rows = level.gather(rows, key)
            whole = [_joined(x, len(levels), d) for x, d in zip(rows, dimensions, strict=True)]
            return [*_axis.local_params(whole, axis_name=axis_name)]

        def scattered(rows: list[jax.Array], key: Any) -> list[jax.Array]:
            for level in reversed(levels):
                rows = level.scatter(rows, key)
            return rows

        def forward(slices: list[jax.Array], key: Any) -> tuple[list[jax.Array], Any]:
            return whole_of(slices, key), key

        def backward(key: Any, gradients: list[jax.Array]) -> tuple[list[jax.Array], None]:
            rows = [_parted(x, sizes, d) for x, d in zip(gradients, dimensions, strict=True)]
            return _only_once(partial(scattered, key=key))(rows), None

        gather = jax.custom_vjp(whole_of)
        gather.defvjp(forward, backward)
        return [*gather(parts, key)]

    def gather(slices: PyTree, key: jax.Array | None = None) -> PyTree:
        require_floating(slices)
        if has_codec and key is None:
            raise ValueError(
                "`weight_gather` with a codec needs a key that is new in each step: pass "
                "`key=jax.random.fold_in(key, step)`, and fold in the layer too if layers have "
                "calls of their own."
            )
        dimensions = _dimensions(specs, slices, axis_name)
        leaves, treedef = jax.tree.flatten(slices)
        sliced = {i: d for i, d in enumerate(dimensions) if d is not None}
        filled = {i: d for i, d in sliced.items() if leaves[i].size}
        same = [i for i in range(len(leaves)) if i not in sliced]
        place = (
            None if key is None else _noise.placed_key(_noise.make_key(0, key), axis_name, slices)
        )
        parts = [_axis.as_varying(leaves[i], axis_name) for i in filled]
        for i, whole in zip(filled, exchanged(parts, [*filled.values()], place), strict=True):
            leaves[i] = whole
        for i in sliced.keys() - filled.keys():
            empty = jnp.broadcast_to(leaves[i], (_axis.size(axis_name), *leaves[i].shape))
            leaves[i] = _joined(empty, 1, sliced[i])
        if not _AVERAGED.get():
            for i, leaf in zip(same, averaged([leaves[i] for i in same], axis_name), strict=True):
                leaves[i] = leaf
        return jax.tree.unflatten(treedef, leaves)

    return gather


_AVERAGED: contextvars.ContextVar[bool] = contextvars.ContextVar("averaged", default=False)


@contextlib.contextmanager
def averaging_whole_leaves(slices: PyTree, specs: PyTree, axis_name: AxisName) -> Iterator[PyTree]:
    """The slices, for a loss that gathers them itself; here the gradients of whole leaves meet.

    No `weight_gather` within the context averages them again.
    """
    leaves, treedef = jax.tree.flatten(slices)
    dimensions = _dimensions(specs, slices, axis_name)
    same = [i for i, dimension in enumerate(dimensions) if dimension is None]
    for i, leaf in zip(same, averaged([leaves[i] for i in same], axis_name), strict=True):
        leaves[i] = leaf
    token = _AVERAGED.set(True)
    try:
        yield jax.tree.unflatten(treedef, leaves)
    finally:
        _AVERAGED.reset(token)


def averaged(leaves: list[jax.Array], axis_name: AxisName) -> list[jax.Array]:
    """The leaves, whose gradient is the mean over workers; those that already differ stay local."""
    equal = [i for i, x in enumerate(leaves) if not _axis.varying(x) & {*_axis.names(axis_name)}]
    average = mean(axis_name)

    def local(leaves: list[jax.Array]) -> list[jax.Array]:
        return [*_axis.local_params(leaves, axis_name=axis_name)]

    def backward(_: None, gradients: list[jax.Array]) -> tuple[list[jax.Array]]:
        return (_only_once(lambda each: average.update(each, average.init(each))[0])(gradients),)

    same = jax.custom_vjp(local)
    same.defvjp(lambda leaves: (local(leaves), None), backward)
    results = dict(zip(equal, same([leaves[i] for i in equal]) if equal else [], strict=True))
    return [results.get(i, x) for i, x in enumerate(leaves)]
