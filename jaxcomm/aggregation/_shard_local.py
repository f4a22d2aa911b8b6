"""Aggregates the shards of parameters that are sharded over other axes, and marks their state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from jaxcomm import _axis, _mesh
from jaxcomm._axis import automatic_axes, state_specs
from jaxcomm._contract import Aggregator, MixingParts, PerWorker, PyTree, require_state
from jaxcomm._mesh import all_restricted, axes_in, require_specs
from jaxcomm._require import checked
from jaxcomm.aggregation._aggregator import axes_of


def _is_marked(node: object) -> bool:
    return isinstance(node, PerWorker)


def _made_without(where: str, axes: tuple[str, ...]) -> ValueError:
    return ValueError(
        f"The state at {where or 'the root'} was made without {axes}, the axes that shard the "
        "parameters: make it with `jaxcomm.init(tx, params, mesh, shard_axes=...)`."
    )


def marked(state: PyTree, axes: tuple[str, ...], varying: frozenset[str]) -> PyTree:
    """The state of one shard, marked as different over `axes` as well.

    Args:
      state: State whose `PerWorker` leaves differ by worker.
      axes: The axes that shard the parameters.
      varying: The paths of other leaves that differ by shard.

    Raises:
      ValueError: If another leaf differs by shard.
    """

    if not axes:
        return state

    def mark(path: tuple[Any, ...], node: Any) -> Any:
        if isinstance(node, PerWorker):
            if not jax.tree.leaves(node):
                return node
            ((workers, tree),) = node.per_worker.items()
            both = _axis.label((*workers.split(","), *axes))
            return PerWorker({both: _axis.local_params(tree, axis_name=axes)})
        where = jax.tree_util.keystr(path)
        if where in varying:
            return _axis.marked(node, axes)
        if _axis.varying(node) & set(axes):
            raise _made_without(where, axes)
        return node

    return jax.tree_util.tree_map_with_path(mark, state, is_leaf=_is_marked)


def unmarked(state: PyTree, axes: tuple[str, ...]) -> tuple[PyTree, frozenset[str]]:
    """The inverse of `marked`, and the paths of leaves that differ by shard only."""
    varying: set[str] = set()
    if not axes:
        return state, frozenset()

    def unmark(path: tuple[Any, ...], node: Any) -> Any:
        if not isinstance(node, PerWorker) or not jax.tree.leaves(node):
            return node
        ((label, tree),) = node.per_worker.items()
        names = tuple(label.split(","))
        if names == axes:
            varying.add(jax.tree_util.keystr(path))
            return _axis.own(node, axes)
        if names[-len(axes) :] != axes:
            raise _made_without(jax.tree_util.keystr(path), axes)
        return PerWorker({_axis.label(names[: -len(axes)]): tree})

    return jax.tree_util.tree_map_with_path(unmark, state, is_leaf=_is_marked), frozenset(varying)


def marked_as_updated(
    tx: optax.GradientTransformationExtraArgs,
    params: PyTree,
    state: PyTree,
    workers: tuple[str, ...],
    axes: tuple[str, ...],
) -> PyTree:
    """The initial state, in which leaves are marked that an update makes different by shard.

    Raises:
      ValueError: If there are no types to find them, and the state has memory.
    """
    if not axes:
        return state
    if _axis.mode(axes[0]) != "checked":
        if any(leaf.ndim for leaf in jax.tree.leaves(state)):
            raise ValueError(
                "The memory of `shard_local` needs `jaxcomm.init`, or `check_vma=True`."
            )
        return state

    def differing(state: PyTree) -> frozenset[str]:
        leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_marked)
        return frozenset(
            jax.tree_util.keystr(path)
            for path, leaf in leaves
            if not _is_marked(leaf) and _axis.varying(leaf) & set(axes)
        )

    def after_update(varying: frozenset[str]) -> frozenset[str]:
        found: list[frozenset[str]] = []

        def update(updates: PyTree, state: PyTree) -> None:
            before, _ = unmarked(marked(state, axes, varying), axes)
            given = [updates] if isinstance(tx, Aggregator) and tx.kind == "gossip" else []
            found.append(differing(tx.update(updates, before, *given, shard_axes=axes)[1]))

        jax.eval_shape(update, _axis.local_params(params, axis_name=workers), state)
        return found[0]

    varying = differing(state)
    while not (after := after_update(varying)) <= varying:
        varying |= after
    return marked(state, axes, varying)


_WHOLE = PartitionSpec()


class ShardLocalState(NamedTuple):
    """The states of an aggregator for leaves that are sharded over the same axes."""

    groups: dict[str, PyTree]  # by these axes, joined by commas; "" for whole leaves


def _spec_of_each(updates: PyTree, specs: PyTree) -> PyTree:
    """The specs of the leaves of `updates`: `optax.masked` and `optax.partition` omit some."""
    spec_at = {
        jax.tree_util.keystr(path): spec
        for path, spec in jax.tree_util.tree_leaves_with_path(specs)
    }

    def spec(path: tuple[Any, ...], leaf: jax.Array) -> PartitionSpec:
        found = spec_at[jax.tree_util.keystr(path)]
        require_specs(path, leaf.shape, found)
        return found

    return jax.tree_util.tree_map_with_path(spec, updates)


def _labels(each: PyTree, workers: tuple[str, ...]) -> PyTree:
    """The group of each leaf: the axes that shard it."""

    def label(path: tuple[Any, ...], spec: PartitionSpec) -> str:
        axes = axes_in(spec)
        if len(set(axes)) < len(axes) or set(axes) & set(workers):
            raise ValueError(
                f"`specs` must name an axis once, and none of the aggregator's {workers}, got "
                f"{spec} at {jax.tree_util.keystr(path) or 'the root'}."
            )
        return _axis.label(tuple(sorted(axes)))

    return jax.tree_util.tree_map_with_path(label, each)


def _axes_of_label(label: str) -> tuple[str, ...]:
    return tuple(label.split(",")) if label else ()


def _selected(tree: PyTree, labels: PyTree, label: str) -> PyTree:
    """The leaves of one group, at their paths."""
    return jax.tree.map(lambda x, own: x if own == label else optax.MaskedNode(), tree, labels)


def _require_shards(updates: PyTree, labels: PyTree) -> None:
    """Raises if the type of a leaf says that all its shards are equal."""

    def check(path: tuple[Any, ...], x: jax.Array, label: str) -> None:
        axes = {name for name in _axes_of_label(label) if _axis.mode(name) == "checked"}
        if missing := sorted(axes - _axis.varying(x)):
            raise ValueError(
                f"`specs` shards the leaf at {jax.tree_util.keystr(path) or 'the root'} over "
                f"{missing}, but all devices have the same values: pass `shard_axes=` to "
                "`jaxcomm.init` and `jaxcomm.make_step`."
            )

    jax.tree_util.tree_map_with_path(check, updates, labels)


def _joined(groups: list[PyTree]) -> PyTree:
    """The tree whose leaves are in one of the groups each."""
    is_masked = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731

    def present(*nodes: PyTree) -> PyTree:
        found = [node for node in nodes if not is_masked(node)]
        return found[0] if found else nodes[0]

    return jax.tree.map(present, *groups, is_leaf=is_masked)


@checked
def shard_local(
    tx: optax.GradientTransformationExtraArgs, specs: PyTree
) -> optax.GradientTransformationExtraArgs:
    r"""Applies an aggregator, or a gossip method, to each device's shard of an update.

    .. math:: \bar x_{\cdot,m} = \operatorname{tx}(x_{1,m}, \ldots, x_{n,m})

    for each shard m of the parameters. If parameters are sharded over another mesh axis (tensor
    parallelism over `"model"`, say), flat buckets of whole leaves would gather the shards first.
    This wrapper measures, encodes and averages each shard separately over the axis of `tx`. Each
    shard has separate norms, random draws and memory. Nothing is sent over the axes of `specs`,
    except the means of metrics with `diagnostics=True`, and with gossip one number, since a worker
    skips all of a step that is not finite. A device sends the payload of `tx` for its shard. Leaves
    that are sharded over the same axes share messages; each such group has one state and one set of
    collectives. All devices of a worker send the leaves that no axis shards.

    Args:
      tx: An aggregator; or a method of :mod:`jaxcomm.gossip`, in its place after the optimizer.
      specs: A tree of `jax.sharding.PartitionSpec` with the structure of the updates: how each leaf
        is sharded over axes other than that of `tx`. `PartitionSpec()` is a whole leaf. For
        parameters on their devices, `jax.tree.map(lambda x: x.sharding.spec, params)`.

    Returns:
      An aggregator, or gossip. In a `jax.shard_map` that leaves the axes of `specs` automatic, such
      as that of `jaxcomm.make_step(..., shard_axes="model")`, updates are whole arrays and this
      wrapper splits them. In a `jax.shard_map` over these axes, updates are already shards. Updates
      keep their sharding and are equal on all workers of `tx`. NaN or infinity makes only the
      group's shard NaN. Memory is `PerWorker` over the axes of `tx` and of the shards: make it with
      `jaxcomm.init(tx, params, mesh, shard_axes="model")`. Without memory, state is equal on all
      devices, and `tx.init(params)` needs no mesh.

    Raises:
      ValueError: If `tx` is neither; in `init` and `update`, if `specs` shards a leaf over an axis
        of `tx` or twice over an axis; if the mesh lacks an axis; or if the leaves are not sharded
        as `specs` says.
      KeyError: If `specs` lacks a leaf.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
      >>> tx = jaxcomm.shard_local(jaxcomm.global_qsgd(levels=1), P(None, "model"))
      >>> average = jax.shard_map(
      ...     lambda g: tx.update(g, tx.init(g))[0],
      ...     mesh=mesh,
      ...     in_specs=P("data"),
      ...     out_specs=P(),
      ...     axis_names={"data"},
      ... )
      >>> print(jax.jit(average)(jnp.array([[3.0, 0.0]])))
      [[3. 0.]]
    """
    parts = tx.parts if isinstance(tx, Aggregator) else None
    mixing = parts if isinstance(parts, MixingParts) else None
    workers = axes_of(tx, "shard_local", ("mean", "loss") if mixing is None else ("gossip",))

    named = [axes_in(spec) for spec in jax.tree.leaves(specs) if isinstance(spec, PartitionSpec)]
    named_axes = {name for names in named for name in names}

    def on_shards(
        fn: Callable[..., PyTree], in_specs: PyTree, out_specs: PyTree
    ) -> Callable[..., PyTree]:
        """`fn` over the axes of `specs` and of the step, except those that are manual already."""
        wanted = sorted(named_axes | {*automatic_axes()})
        axes = tuple(name for name in wanted if not _axis.is_bound(name))
        if not axes:
            return fn
        over = lambda specs: all_restricted(specs, axes)  # noqa: E731
        return _mesh.over_shards(fn, axes, over(in_specs), over(out_specs), workers)

    def init_fn(params: PyTree) -> ShardLocalState:
        each = _spec_of_each(params, specs)
        labels = _labels(each, workers)
        names = sorted(set(jax.tree.leaves(labels)))

        def first(params: PyTree) -> ShardLocalState:
            groups = {}
            for label in names:
                selected, own = _selected(params, labels, label), _axes_of_label(label)
                state = tx.init(selected)
                groups[label] = marked_as_updated(tx, selected, state, workers, own)
            return ShardLocalState(groups)

        if not _axis.is_bound(workers):
            return ShardLocalState(
                {label: tx.init(_selected(params, labels, label)) for label in names}
            )
        structure: list[PyTree] = []

        def record(params: PyTree) -> tuple[()]:
            _require_shards(params, labels)
            structure.append(jax.tree.map(lambda _: 0, first(params)))
            return ()

        jax.eval_shape(on_shards(record, (each,), ()), params)
        result: ShardLocalState = on_shards(first, (each,), state_specs(structure[0]))(params)
        return result

    @jax.named_scope("flag")
    def of_all_shards(flag: jax.Array) -> jax.Array:
        """Whether `flag` holds on all devices of the worker."""
        over = tuple(name for name in sorted(named_axes) if _axis.is_bound(name))
        if not over:
            return flag
        return lax.pmin(_axis.as_varying(flag.astype(jnp.int32), over), over) == 1

    def update_fn(
        updates: PyTree,
        state: ShardLocalState,
        params: PyTree = None,
        *,
        shard_axes: tuple[str, ...] = (),
        **extra_args: Any,
    ) -> tuple[PyTree, ShardLocalState]:
        require_state(state, ShardLocalState, "`shard_local`")
        if shard_axes:
            raise ValueError("`shard_local` cannot be inside another `shard_local`.")
        each = _spec_of_each(updates, specs)
        labels = _labels(each, workers)
        names = sorted(set(jax.tree.leaves(labels)))
        if not names:
            return updates, state
        static = {name: x for name, x in extra_args.items() if name == "outer_axes"}
        arrays = {name: x for name, x in extra_args.items() if name not in static}
        if mixing is None:
            params = ()  # Aggregators do not read them.

        def update(
            updates: PyTree, params: PyTree, state: ShardLocalState, arrays: dict[str, PyTree]
        ) -> tuple[PyTree, ShardLocalState]:
            _require_shards(updates, labels)
            if mixing is not None:
                weight, present = arrays.get("weight"), arrays.get("present")
                share = mixing.share(state.groups[names[0]], params, weight, present)
                fits = of_all_shards(mixing.fits(params, updates, share))
                arrays = {**arrays, "share": share, "applies": fits}
            results, groups = [], {}
            for label in names:
                selected, own = _selected(updates, labels, label), _axes_of_label(label)
                before, varying = unmarked(state.groups[label], own)
                like = jax.eval_shape(tx.init, selected)
                result, after = tx.update(
                    selected,
                    # It may have been made for whole leaves, without memory.
                    jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(before)),
                    *([] if mixing is None else [_selected(params, labels, label)]),
                    shard_axes=own,
                    **static,
                    **arrays,
                )
                after = jax.tree.unflatten(jax.tree.structure(before), jax.tree.leaves(after))
                results.append(result)
                groups[label] = marked(after, own, varying)
            return _joined(results), ShardLocalState(groups)

        specs_after = state_specs(state)
        of_params = () if mixing is None else each
        run = on_shards(update, (each, of_params, specs_after, _WHOLE), (each, specs_after))
        result: tuple[PyTree, ShardLocalState] = run(updates, params, state, arrays)
        return result

    return Aggregator(
        init_fn, update_fn, workers, "mean" if mixing is None else "gossip", parts=mixing
    )
