"""Means over two kinds of links: in stages, and shared by the devices of a worker."""

from typing import Any, NamedTuple

import jax
import optax
from jax import lax

from jaxcomm import _axis, _collectives
from jaxcomm._contract import Aggregator, AxisName, PyTree, require_state
from jaxcomm._require import checked, named, own_weight, weight_dtype
from jaxcomm.aggregation._aggregator import axes_of, is_stateless, needs_whole
from jaxcomm.aggregation._rows import from_rows, to_block_rows
from jaxcomm.aggregation._shard_local import marked, unmarked


@named
def hierarchical(
    *stages: optax.GradientTransformationExtraArgs,
    outer_axes: AxisName = (),
) -> optax.GradientTransformationExtraArgs:
    r"""Averages over one mesh axis after another, with one aggregator for each.

    .. math:: \bar x = \frac{1}{m} \sum_{k=1}^m \frac{1}{n} \sum_{i=1}^n x_{ki}

    `hierarchical(jaxcomm.mean("ici"), jaxcomm.global_qsgd("dcn"))` averages updates exactly over
    the fast links of `"ici"`, and compresses the result over the slow links of `"dcn"`. Each stage
    sends its bytes over its own axes. The error bound of each stage applies to the updates that it
    receives.

    Args:
      *stages: Aggregators over disjoint axes, the innermost and fastest first. Only the last stage
        may have memory, since the memory of the others would differ over the outer axes.
      outer_axes: Further axes, over which updates differ before and after: those of replicas that
        consist of several devices. No stage may then have memory.

    Returns:
      A transformation to place before the optimizer. Name all axes, outermost first, in
      `make_step(..., axis_name=("dcn", "ici"))`. `update(..., weight=w)` computes a weighted mean;
      between stages, weights are summed, 4 bytes each.

    Raises:
      ValueError: If there are no stages, a stage is not an aggregator, or two stages name the same
        axis; in `update`, if a stage other than the last has memory, an axis is not bound, or
        updates vary over an axis that no stage names.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.hierarchical(jaxcomm.mean("ici"), jaxcomm.global_qsgd("dcn"))
      >>> average = lambda x: tx.update(x, tx.init(x))[0]
      >>> over_ici = jax.vmap(average, axis_name="ici")
      >>> average = jax.jit(jax.vmap(over_ici, axis_name="dcn"))
      >>> print(average(jnp.array([[1.0, 5.0], [2.0, 4.0]])))
      [[3. 3.]
       [3. 3.]]
    """
    axes = [axes_of(stage, "hierarchical") for stage in stages]
    replicas = _axis.names(outer_axes)
    named = [name for names in (*axes, replicas) for name in names]
    if not stages or len(set(named)) < len(named):
        raise ValueError(f"`hierarchical` takes one or more stages over other axes, got {named}.")

    def init_fn(params: PyTree) -> tuple[PyTree, ...]:
        return tuple(stage.init(params) for stage in stages)

    def update_fn(
        updates: PyTree,
        state: tuple[PyTree, ...],
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        outer_axes: tuple[str, ...] = (),
        **extra_args: object,
    ) -> tuple[PyTree, tuple[PyTree, ...]]:
        after = []
        for level, (stage, stage_state) in enumerate(zip(stages, state, strict=True)):
            # Outermost first, so that worker indices follow the order of the mesh.
            later = [name for names in reversed(axes[level + 1 :]) for name in names]
            outer = (*replicas, *outer_axes, *later)
            extra = dict(extra_args) if weight is None else {**extra_args, "weight": weight}
            updates, new_state = stage.update(
                updates, stage_state, params, outer_axes=outer, **extra
            )
            after.append(new_state)
            if weight is not None and level + 1 < len(stages):
                own = own_weight(weight, weight_dtype(updates))
                with jax.named_scope("weight"):
                    weight = lax.psum(_axis.as_varying(own, axes[level]), axes[level])
        return updates, tuple(after)

    return Aggregator(
        init_fn,
        update_fn,
        tuple(name for names in reversed(axes) for name in names),
        needs_whole=needs_whole(stages),
    )


class SlicedState(NamedTuple):
    """The state of an aggregator for the slices, `PerWorker` over the axis of slices as well."""

    inner: PyTree


def _paths(state: PyTree) -> frozenset[str]:
    return frozenset(
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)
    )


@checked
def sliced(
    tx: optax.GradientTransformationExtraArgs, *, axis_name: AxisName
) -> optax.GradientTransformationExtraArgs:
    r"""Shares the work of an aggregator between devices whose updates are equal.

    .. math:: \bar x = \big(\operatorname{tx}(x_{1,1}, \ldots, x_{n,1}), \ldots,
        \operatorname{tx}(x_{1,m}, \ldots, x_{n,m})\big)

    where :math:`x_{k,j}` is slice j of the update of worker k. The m devices of worker k all have
    this update. Without `sliced`, each of them would send all of it to other workers, often over
    one link that they share. Here device j aggregates slice j, and the devices then exchange the
    aggregated slices: the slow link carries each coordinate once per worker.

    `hierarchical(mean("ici"), sliced(global_qsgd("dcn"), axis_name="ici"))` averages over islands
    of m devices. Over the fast links, it sends 1.5 times what a reduce-scatter and an all-gather
    would: the first stage ends with the whole mean, as all stages do.

    A matrix is cut along its first axis if m divides it. Other leaves are flattened, and padded
    with zeros. Each slice has separate statistics, random draws and memory.

    Args:
      tx: An aggregator over other axes.
      axis_name: The mesh axis, or axes, of the devices. Updates are equal over it, as after
        `mean(axis_name)`.

    Returns:
      An aggregator over the axes of `tx`. Updates are equal over `axis_name` too. A device sends
      the payload of `tx` for 1/m of the coordinates, and :math:`(m-1)/m` of the mean over
      `axis_name`, in the dtype of the leaf. NaN or infinity makes only its slice NaN. All state is
      `PerWorker` over `axis_name`: make it with `jaxcomm.init(tx, params, mesh)`.

    Raises:
      ValueError: If `tx` is not an aggregator, or is one over `axis_name`. In `update`, if updates
        differ over `axis_name`, or the axis is not bound.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.hierarchical(
      ...     jaxcomm.mean("ici"), jaxcomm.sliced(jaxcomm.global_qsgd("dcn"), axis_name="ici")
      ... )
      >>> average = lambda x: tx.update(x, tx.init(x))[0]
      >>> over_ici = jax.vmap(average, axis_name="ici")
      >>> average = jax.jit(jax.vmap(over_ici, axis_name="dcn"))
      >>> print(average(jnp.array([[[1.0, 5.0], [3.0, 5.0]], [[2.0, 4.0], [2.0, 6.0]]])))
      [[[2. 5.]
        [2. 5.]]
      <BLANKLINE>
       [[2. 5.]
        [2. 5.]]]
    """
    workers, devices = axes_of(tx, "sliced"), _axis.names(axis_name)
    if common := sorted({*workers} & {*devices}):
        raise ValueError(
            f"`axis_name`={axis_name!r} of `sliced` names {common}, over which `tx` averages."
        )

    def own_slices(tree: PyTree) -> PyTree:
        count, me = _axis.size(axis_name), _axis.index(axis_name)
        return jax.tree.map(lambda x: to_block_rows(x, count)[me], tree)

    @jax.named_scope("slices")
    def joined(own: jax.Array, like: jax.Array) -> jax.Array:
        return from_rows(_collectives.gather(own, axis_name), like.shape)

    def init_fn(params: PyTree) -> SlicedState:
        if not _axis.is_bound(axis_name) and is_stateless(tx, params):
            return SlicedState(tx.init(params))
        state = tx.init(own_slices(params))
        return SlicedState(marked(state, devices, _paths(state)))

    def update_fn(
        updates: PyTree,
        state: SlicedState,
        params: PyTree = None,
        *,
        shard_axes: tuple[str, ...] = (),
        **extra_args: Any,
    ) -> tuple[PyTree, SlicedState]:
        del params
        require_state(state, SlicedState, "`sliced`")
        _axis.require_replicated(
            updates,
            devices,
            "The update that `sliced` takes",
            f"Average over {axis_name!r} before, as in `hierarchical(mean({axis_name!r}), ...)`.",
        )
        before, varying = unmarked(state.inner, devices)
        means, after = tx.update(
            own_slices(updates), before, shard_axes=(*shard_axes, *devices), **extra_args
        )
        whole = jax.tree.map(joined, means, updates)
        return whole, SlicedState(marked(after, devices, varying))

    return Aggregator(init_fn, update_fn, workers, needs_whole=needs_whole([tx]))
