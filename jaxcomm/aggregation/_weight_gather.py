"""Weights in slices: gathered whole for the loss, and their gradients back in slices (ZeRO-3)."""

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxcomm import _axis, _noise
from jaxcomm._collectives import gather_contents
from jaxcomm._contract import AxisName, Codec, Keys, PyTree
from jaxcomm._mesh import axes_in
from jaxcomm._require import checked
from jaxcomm._units import Scope, require_floating
from jaxcomm.aggregation._mean import mean
from jaxcomm.aggregation._server_ends import End, Moved, leaves_finite

Codecs = Codec | Mapping[str, Codec] | None
Gather = Callable[..., PyTree]


def _or_nan(moved: Moved) -> PyTree:
    return jax.tree.map(lambda x: jnp.where(moved.finite, x, jnp.nan), moved.tree)


def _start(
    end: End, tree: PyTree, slices: PyTree, key: Any, workers: AxisName
) -> tuple[Keys, list[PyTree]]:
    """The PRNG keys of an end, independent of those of all other workers, and its empty memory."""
    if end.codec is None:
        return Keys(key, key), []
    if jax.tree.leaves(jax.eval_shape(end.codec.init, jnp.zeros(1))):
        raise ValueError(
            "`weight_gather` takes codecs without memory: a loss has no state; see `sharded_server`"
        )
    # `key` is placed by the paths of the leaves, and the same place again would undo that.
    place = _noise.placed_key(key, ("level", *_axis.names(end.axis_name)), ())
    keys = _noise.keys_of_units(
        place, jnp.uint32(end.of_rows), end.key_count(slices), _axis.index(workers)
    )
    return keys, end.init(tree)


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


def _dimensions(specs: PyTree, like: PyTree, axis_name: AxisName) -> list[int | None]:
    """The dimension of each leaf of `like` that its spec shards over the workers, or `None`.

    Raises:
      ValueError: If a spec names other axes, not all of the workers' in their order, or a dimension
        that a leaf does not have.
    """
    names = _axis.names(axis_name)
    found: list[int | None] = []

    def add(path: tuple[Any, ...], spec: PartitionSpec, part: PyTree) -> None:
        leaves, axes = jax.tree.leaves(part), axes_in(spec)
        fits = [d for d, entry in enumerate(spec) if axes_in(PartitionSpec(entry)) == axes]
        if axes and (axes != names or not all(fits[0] < x.ndim for x in leaves)):
            raise ValueError(
                f"The spec at {jax.tree_util.keystr(path) or 'the root'}, {spec}, must shard one "
                f"dimension of its leaves over all axes of the workers, {axis_name!r}, or none."
            )
        found.extend([fits[0] if axes else None] * len(leaves))

    jax.tree_util.tree_map_with_path(add, specs, like)
    return found


def _joined(rows: jax.Array, levels: int, dimension: int) -> jax.Array:
    """The whole leaf of its slices, `[innermost axis, ..., outermost axis, *slice]`."""
    parts = jnp.moveaxis(rows, range(levels), range(dimension + levels - 1, dimension - 1, -1))
    shape, after = parts.shape, dimension + levels + 1
    return parts.reshape(*shape[:dimension], math.prod(shape[dimension:after]), *shape[after:])


def _gathered_over(axis_name: AxisName) -> str:
    return f"weight_gather/{_axis.label(axis_name)}"


def secondary_partition(axis_name: AxisName) -> Callable[..., bool]:
    r"""A policy of `jax.checkpoint` that keeps weights as they are gathered over an axis (hpZ).

    .. math:: \text{forward: } x_{\text{device}} = (x_1, \ldots, x_{\text{nodes}}), \quad
              x = (x_{1}, \ldots, x_{\text{devices}}); \qquad
              \text{backward: } x = (x_{1}, \ldots, x_{\text{devices}})

    A layer that gathers its weights by axis, over nodes first, then holds between the passes its
    share of a copy per node: `1 / devices` of the weights. The backward pass gathers over the
    devices of the node, and sends nothing between nodes for weights.

    Args:
      axis_name: The axis between nodes, the first one of :func:`weight_gather`.

    Returns:
      The `policy` of :func:`jax.checkpoint` for a layer.

    Example:
      >>> import functools, jax, jaxcomm
      >>> from jaxcomm.aggregation import secondary_partition, weight_gather
      >>> axes = ("node", "device")
      >>> gather = weight_gather(jax.P(axes), axis_name=axes, pull={})  # By axis, exactly.
      >>> @functools.partial(jax.checkpoint, policy=secondary_partition("node"))
      ... def layer(slices, x):
      ...     return x @ gather(slices)

    References:
      Wang et al., `ZeRO++ <https://arxiv.org/abs/2306.10209>`_, 2023: hierarchical partitioning.
    """
    return jax.checkpoint_policies.save_only_these_names(_gathered_over(axis_name))


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
      `pull` is its quantized weights, `push` by axis its quantized gradients, and
      :func:`secondary_partition` its second copy of weights within a node. Difference: any number
      of workers per axis.
    """
    names = _axis.names(axis_name)
    by_axis = isinstance(push, Mapping) or isinstance(pull, Mapping)
    axes: tuple[AxisName, ...] = names if by_axis else (axis_name,)

    def ends(codecs: Codecs, *, of_rows: bool) -> list[End]:
        """The ends over all axes as one; or, if codecs are given by axis, outermost first."""
        given: Mapping[Any, Codec | None] = (
            codecs if isinstance(codecs, Mapping) else dict.fromkeys(axes, codecs)
        )
        if unknown := [name for name in given if name not in axes]:
            raise ValueError(f"A codec is for {unknown}, but `axis_name` is {axis_name!r}.")
        return [End(axis, given.get(axis), scope, bucket_bytes, of_rows=of_rows) for axis in axes]

    pushes, pulls = ends(push, of_rows=True), ends(pull, of_rows=False)
    has_codec = any(end.codec is not None for end in [*pushes, *pulls])

    def gathered(end: End, slices: PyTree, key: Any) -> PyTree:
        """The slices of all workers over the axis, on a new leading dimension of each leaf."""
        if end.codec is None:
            with jax.named_scope("slices"):
                return gather_contents(slices, end.axis_name)
        start = _start(end, slices, slices, key, axis_name)
        return _or_nan(end.pull(slices, *start, leaves_finite(slices)))

    def scattered(end: End, rows: PyTree, key: Any) -> PyTree:
        """The mean over the axis of the row that this worker owns; all NaN if any row has a NaN."""
        own = jax.tree.map(lambda x: x[0], rows)
        return _or_nan(end.push(rows, *_start(end, rows, own, key, axis_name)))

    @jax.named_scope("weight_gather")
    def rows_of(slices: list[jax.Array], key: Any) -> list[jax.Array]:
        rows = slices
        for end in pulls:
            rows = checkpoint_name(gathered(end, rows, key), _gathered_over(end.axis_name))
        return [*_axis.local_params(rows, axis_name=axis_name)]

    @jax.named_scope("weight_gather")
    def means_of(rows: list[jax.Array], key: Any) -> list[jax.Array]:
        return functools.reduce(lambda rows, end: scattered(end, rows, key), pushes[::-1], rows)

    def backward(key: Any, rows: list[jax.Array]) -> tuple[list[jax.Array], None]:
        return _only_once(lambda rows: means_of(rows, key))(rows), None

    gather_rows = jax.custom_vjp(rows_of)
    gather_rows.defvjp(lambda slices, key: (rows_of(slices, key), key), backward)

    def gather(slices: PyTree, key: jax.Array | None = None) -> PyTree:
        require_floating(slices)
        if has_codec and key is None:
            raise ValueError(
                "`weight_gather` with a codec needs a key that is new in each step and layer: pass "
                "`key=jax.random.fold_in(key, step)`."
            )
        place = (
            key if key is None else _noise.placed_key(_noise.require_key(key), axis_name, slices)
        )
        dimensions = _dimensions(specs, slices, axis_name)
        leaves, treedef = jax.tree.flatten(slices)
        sliced = {i: d for i, d in enumerate(dimensions) if d is not None}
        parts = [_axis.as_varying(leaves[i], axis_name) for i in sliced]
        rows = gather_rows(parts, place) if parts else []
        for (i, dimension), x in zip(sliced.items(), rows, strict=True):
            leaves[i] = _joined(x, len(axes), dimension)
        if not _AVERAGED.get():
            leaves = _averaged(leaves, dimensions, axis_name)
        return jax.tree.unflatten(treedef, leaves)

    return gather


_AVERAGED: contextvars.ContextVar[bool] = contextvars.ContextVar("averaged", default=False)


@contextlib.contextmanager
def averaging_whole_leaves(slices: PyTree, specs: PyTree, axis_name: AxisName) -> Iterator[PyTree]:
    """The slices, for a loss that gathers them itself; here the gradients of whole leaves meet.

    No `weight_gather` within the context averages them again.
    """
    leaves, treedef = jax.tree.flatten(slices)
    leaves = _averaged(leaves, _dimensions(specs, slices, axis_name), axis_name)
    token = _AVERAGED.set(True)
    try:
        yield jax.tree.unflatten(treedef, leaves)
    finally:
        _AVERAGED.reset(token)


def _averaged(
    leaves: list[jax.Array], dimensions: list[int | None], axis_name: AxisName
) -> list[jax.Array]:
    """Whole leaves get the mean gradient of the workers; those that already differ stay local."""
    axes = {*_axis.names(axis_name)}
    equal = [
        i
        for i, (x, dimension) in enumerate(zip(leaves, dimensions, strict=True))
        if dimension is None and not _axis.varying(x) & axes
    ]
    if not equal:
        return leaves
    average = mean(axis_name)

    def local(leaves: list[jax.Array]) -> list[jax.Array]:
        return [*_axis.local_params(leaves, axis_name=axis_name)]

    def backward(_: None, gradients: list[jax.Array]) -> tuple[list[jax.Array]]:
        return (_only_once(lambda each: average.update(each, average.init(each))[0])(gradients),)

    same = jax.custom_vjp(local)
    same.defvjp(lambda leaves: (local(leaves), None), backward)
    results = dict(zip(equal, same([leaves[i] for i in equal]), strict=True))
    return [results.get(i, x) for i, x in enumerate(leaves)]
