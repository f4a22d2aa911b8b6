"""A mean over nested axes, with one aggregator per stage."""

import jax
import optax
from jax import lax

from jaxcomm import _axis
from jaxcomm._contract import Aggregator, AxisName, PyTree
from jaxcomm._require import own_weight, weight_dtype
from jaxcomm.aggregation._aggregator import axes_of, needs_whole


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
    if not stages:
        raise ValueError("`hierarchical` needs at least one aggregator.")
    axes = [axes_of(stage, "hierarchical") for stage in stages]
    replicas = _axis.names(outer_axes)
    named = [name for names in (*axes, replicas) for name in names]
    if len(set(named)) < len(named):
        raise ValueError(
            f"The stages and `outer_axes` of `hierarchical` name an axis twice: {named}."
        )

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
        if not isinstance(state, tuple | list) or len(state) != len(stages):
            raise ValueError(
                "This state belongs to another transformation: `hierarchical` expects a tuple of "
                f"{len(stages)} states, one per stage, got `{type(state).__name__}`. Pass the "
                "state from `jaxcomm.init` for the same `tx`."
            )
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
                weight = lax.psum(_axis.as_varying(own, axes[level]), axes[level])
        return updates, tuple(after)

    return Aggregator(
        init_fn,
        update_fn,
        tuple(name for names in reversed(axes) for name in names),
        needs_whole=needs_whole(stages),
    )
