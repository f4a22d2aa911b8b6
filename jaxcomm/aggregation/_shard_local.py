"""An aggregator beside parameters that are sharded over other mesh axes."""

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
    """The specs of the leaves there are: `optax.masked` and `optax.partition` leave some out."""
    known = {
        jax.tree_util.keystr(path): spec
        for path, spec in jax.tree_util.tree_leaves_with_path(
            specs, is_leaf=lambda node: isinstance(node, PartitionSpec)
        )
    }

    def spec(path: tuple[Any, ...], leaf: jax.Array) -> PartitionSpec:
        del leaf
        where = jax.tree_util.keystr(path)
        if not isinstance(known.get(where), PartitionSpec):
            raise ValueError(f"`specs` has no PartitionSpec at {where or 'the root'}.")
        return known[where]

    return jax.tree_util.tree_map_with_path(spec, updates)


@checked()
def shard_local(
    tx: optax.GradientTransformationExtraArgs, specs: PyTree
) -> optax.GradientTransformationExtraArgs:
    r"""Lets an aggregator work on each device's own shard of an update.

    Where parameters are sharded over another mesh axis (tensors cut over `"model"`, say), flat
    buckets of whole leaves would gather the shards first. Here each shard is measured, coded and
    averaged over the axis of `tx` by itself, with norms and random draws of its own, and nothing is
    sent over the axes of `specs` (but the means that `diagnostics=True` tells). A worker sends
    what `tx` sends for its shard.

    Args:
      tx: An aggregator without memory.
      specs: A tree like the updates, of `jax.sharding.PartitionSpec`: how each leaf is cut over
        other axes than that of `tx`. All leaves over the same axes; take whole ones apart with
        `optax.partition`.

    Returns:
      A transformation to place before the optimizer. In a `jax.shard_map` that leaves the axes of
      `specs` automatic (`axis_names={"data"}`), updates are whole and cut within; in one that names
      them, updates are the shards already. Updates come back cut as they came, equal on all workers
      of `tx`. NaN or infinity makes NaN of its shard only. State is equal everywhere, so that
      `tx.init(params)` needs no mesh.

    Raises:
      ValueError: If `tx` is no aggregator; in `update`, if `specs` lacks a leaf, leaves are cut
        over unlike axes or over none or over that of `tx`, an axis is in no mesh, or `tx` has
        memory.

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
                f"`specs` must cut all leaves over the same axes, and none of {own_axes}, got "
                f"{cut}. Take the others apart with `optax.partition`."
            )
        axes = tuple(sorted(kinds.pop()))

        def update(
            updates: PyTree, leaves: list[jax.Array], weight: jax.Array | float | None
        ) -> tuple[PyTree, list[jax.Array]]:
            # The units of shards are not those of whole leaves, but hold as little memory: none.
            like, local = jax.tree.flatten(jax.eval_shape(tx.init, updates))
            if len(like) != len(leaves):
                raise ValueError("`shard_local` takes aggregators without memory.")
            result, after = tx.update(
                updates, jax.tree.unflatten(local, leaves), outer_axes=axes, weight=weight
            )
            return result, jax.tree.leaves(after)

        leaves, structure = jax.tree.flatten(state)
        if not all(map(_axis.is_bound, axes)):
            update = _axis.over_shards(update, axes, each, own_axes)
        result, after = update(updates, leaves, weight)
        return result, jax.tree.unflatten(structure, after)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
