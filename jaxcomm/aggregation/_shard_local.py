"""Aggregators for parameters that are sharded over other mesh axes."""

from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from jaxcomm import _axis
from jaxcomm._base import PyTree
from jaxcomm._require import checked
from jaxcomm.aggregation._stages import axes_of


def _axes_in(spec: PartitionSpec) -> frozenset[str]:
    """The mesh axes that a spec shards over."""
    entries = [entry for entry in spec if entry is not None]
    return frozenset(
        name for entry in entries for name in ([entry] if isinstance(entry, str) else entry)
    )


def _spec_of_each(updates: PyTree, specs: PyTree) -> PyTree:
    """The specs of the leaves of `updates`: `optax.masked` and `optax.partition` omit some."""
    spec_at = {
        jax.tree_util.keystr(path): spec
        for path, spec in jax.tree_util.tree_leaves_with_path(
            specs, is_leaf=lambda node: isinstance(node, PartitionSpec)
        )
    }

    def spec(path: tuple[Any, ...], leaf: jax.Array) -> PartitionSpec:
        del leaf
        where = jax.tree_util.keystr(path)
        if not isinstance(spec_at.get(where), PartitionSpec):
            raise ValueError(f"`specs` has no PartitionSpec at {where or 'the root'}.")
        return spec_at[where]

    return jax.tree_util.tree_map_with_path(spec, updates)


@checked()
def shard_local(
    tx: optax.GradientTransformationExtraArgs, specs: PyTree
) -> optax.GradientTransformationExtraArgs:
    r"""Applies an aggregator to each device's shard of an update.

    If parameters are sharded over another mesh axis (tensor parallelism over `"model"`, say), flat
    buckets of whole leaves would gather the shards first. This wrapper measures, encodes and
    averages each shard separately over the axis of `tx`. Each shard has separate norms and random
    draws. Nothing is sent over the axes of `specs`, except the means of metrics with
    `diagnostics=True`. A worker sends the payload of `tx` for its shard.

    Args:
      tx: An aggregator without memory.
      specs: A tree of `jax.sharding.PartitionSpec` with the structure of the updates: how each leaf
        is sharded over axes other than that of `tx`. All leaves must be sharded over the same axes;
        route the other leaves to another aggregator with `optax.partition`.

    Returns:
      A transformation to place before the optimizer. In a `jax.shard_map` that leaves the axes of
      `specs` automatic (`axis_names={"data"}`), updates are whole arrays and this wrapper splits
      them. In a `jax.shard_map` over these axes, updates are already shards. Updates keep their
      sharding and are equal on all workers of `tx`. NaN or infinity makes only its shard NaN. State
      is equal on all devices, so `tx.init(params)` needs no mesh.

    Raises:
      ValueError: If `tx` is not an aggregator; in `update`, if `specs` lacks a leaf or `tx` has
        memory; if leaves are sharded over different axes, over no axis, or over the axis of `tx`;
        or if the mesh lacks an axis.

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
    own_axes = axes_of(tx, "shard_local")

    def init_fn(params: PyTree) -> PyTree:
        return tx.init(params)

    def update_fn(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        **extra_args: object,
    ) -> tuple[PyTree, PyTree]:
        del params, extra_args
        each = _spec_of_each(updates, specs)
        cuts = {
            jax.tree_util.keystr(path): _axes_in(spec)
            for path, spec in jax.tree_util.tree_leaves_with_path(
                each, is_leaf=lambda node: isinstance(node, PartitionSpec)
            )
        }
        kinds = set(cuts.values())
        if not kinds:
            return tx.update(updates, state)
        if len(kinds) > 1 or not min(kinds) or min(kinds) & set(own_axes):
            cut = {where: sorted(axes) for where, axes in cuts.items()}
            raise ValueError(
                "`specs` must shard all leaves over the same axes, at least one, and not over "
                f"{own_axes}, the axes of the aggregator, got {cut}. Separate the other "
                "leaves with `optax.partition`."
            )
        axes = tuple(sorted(kinds.pop()))

        def update(
            updates: PyTree, leaves: list[jax.Array], weight: jax.Array | float | None
        ) -> tuple[PyTree, list[jax.Array]]:
            # Shards and whole leaves divide into different units, but neither has memory.
            like, structure = jax.tree.flatten(jax.eval_shape(tx.init, updates))
            if len(like) != len(leaves):
                raise ValueError("`shard_local` takes only aggregators without memory.")
            result, after = tx.update(
                updates, jax.tree.unflatten(structure, leaves), outer_axes=axes, weight=weight
            )
            return result, jax.tree.leaves(after)

        leaves, structure = jax.tree.flatten(state)
        if not all(map(_axis.is_bound, axes)):
            update = _axis.over_shards(update, axes, each, own_axes)
        result, after = update(updates, leaves, weight)
        return result, jax.tree.unflatten(structure, after)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
