"""What wrappers need to compose aggregators: axes, common states, and means without state."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import optax

from jaxcomm import _axis
from jaxcomm._contract import Aggregator, AxisName, Kind, PyTree, require_state
from jaxcomm._require import described
from jaxcomm._resize import noting
from jaxcomm._units import require_floating


def needs_whole(stages: Iterable[optax.GradientTransformation]) -> str:
    """The option by which one of these aggregators needs all gradients at once; empty if none."""
    return next(filter(None, (getattr(stage, "needs_whole", "") for stage in stages)), "")


def axes_of(
    tx: optax.GradientTransformation, user: str, kinds: tuple[Kind, ...] = ("mean", "loss")
) -> tuple[str, ...]:
    """The axes over which an aggregator averages.

    Raises:
      ValueError: If `tx` is not an aggregator that `user` can wrap.
    """
    if not isinstance(tx, Aggregator) or tx.kind not in kinds:
        raise ValueError(
            f"`{user}` takes aggregators, such as `jaxcomm.mean()`, got {described(tx)}. Chain the "
            f"optimizer after `{user}`, not inside it."
        )
    return tx.axes


def common_axes(stages: Sequence[optax.GradientTransformation], user: str) -> tuple[str, ...]:
    """The axes over which all stages average.

    Raises:
      ValueError: If there is no stage, a stage is not an aggregator, or their axes differ.
    """
    axes = {axes_of(stage, user) for stage in stages}
    if len(axes) != 1:
        raise ValueError(f"`{user}` takes one or more stages over the same axes, got {axes}.")
    return axes.pop()


def is_stateless(stage: optax.GradientTransformation, like: PyTree) -> bool:
    """Whether the state of a stage for a tree has no arrays, as that of `mean`."""
    with noting():  # Rules of states that are discarded do not count.
        return not jax.tree.leaves(jax.eval_shape(stage.init, like))


def common_state(stages: Sequence[optax.GradientTransformation], params: PyTree) -> PyTree:
    """The initial state of the first stage that has one, which all others with a state use."""
    with_state = [stage for stage in stages if not is_stateless(stage, params)]
    return (with_state or stages)[0].init(params)


def require_no_weight(weight: Any) -> None:
    """Raises if a weight is passed to an aggregator whose result is no mean."""
    if weight is not None:
        raise ValueError("This aggregator takes no `weight`, since its result is no mean.")


def stateless(
    axis_name: AxisName, user: str, average: Callable[[PyTree, Any], PyTree]
) -> Aggregator:
    """The aggregator without state that replaces updates by `average(updates, weight)`."""

    def init_fn(params: PyTree) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update_fn(
        updates: PyTree,
        state: optax.EmptyState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        outer_axes: tuple[str, ...] = (),
        shard_axes: tuple[str, ...] = (),
        **extra_args: object,
    ) -> tuple[PyTree, optax.EmptyState]:
        del params, extra_args
        require_state(state, optax.EmptyState, user)
        require_floating(updates)
        _axis.require_local(updates, axis_name, (*shard_axes, *outer_axes))
        return average(updates, weight), state

    return Aggregator(init_fn, update_fn, axis_name)


def require_last_stage(outer_axes: tuple[str, ...], axis_name: AxisName) -> None:
    """Raises if an aggregator with memory is a stage of `hierarchical` before the last one."""
    if outer_axes:
        raise ValueError(
            f"The aggregator over {axis_name!r} keeps memory, which would differ over "
            f"{[*outer_axes]}. Only the last stage of `hierarchical` may keep memory."
        )
