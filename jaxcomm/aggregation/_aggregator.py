"""Declares the axes over which an aggregator averages, so that wrappers can compose aggregators."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import optax

from jaxcomm._contract import Aggregator, AxisName, Kind, PyTree
from jaxcomm._require import require_transformation
from jaxcomm._resize import noting


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
    require_transformation(tx, "tx" if user == "shard_local" else "stages")
    if not isinstance(tx, Aggregator) or tx.kind not in kinds:
        raise ValueError(
            f"`{user}` takes aggregators that jaxcomm can nest, such as `jaxcomm.mean('ici')` and "
            f"`jaxcomm.global_qsgd('dcn')`, got {tx!r}. Chain the optimizer after `{user}`, not "
            "inside it."
        )
    return tx.axes


def common_axes(stages: Sequence[optax.GradientTransformation], user: str) -> tuple[str, ...]:
    """The axes over which all stages average.

    Raises:
      ValueError: If there is no stage, a stage is not an aggregator, or their axes differ.
    """
    if not stages:
        raise ValueError(f"`{user}` needs at least one aggregator.")
    axes = [axes_of(stage, user) for stage in stages]
    if len(set(axes)) > 1:
        raise ValueError(f"The stages of `{user}` must average over the same axes, got {axes}.")
    return axes[0]


def is_stateless(stage: optax.GradientTransformation, like: PyTree) -> bool:
    """Whether the state of a stage for a tree has no arrays, as that of `mean`."""
    return not jax.tree.leaves(_shapes_of(stage, like))


def _shapes_of(stage: optax.GradientTransformation, like: PyTree) -> PyTree:
    with noting():  # Rules of states that are discarded do not count.
        return jax.eval_shape(stage.init, like)


def common_state(
    stages: Sequence[optax.GradientTransformation], params: PyTree, user: str
) -> PyTree:
    """The initial state of the first stage that has one, which all others with a state can use.

    Raises:
      ValueError: If the state of another stage differs in structure, shape or dtype.
    """
    numbers = [i for i, stage in enumerate(stages) if not is_stateless(stage, params)]
    if not numbers:
        numbers = [0]

    def described(stage: optax.GradientTransformation) -> dict[str, str]:
        leaves = jax.tree_util.tree_leaves_with_path(_shapes_of(stage, params))
        return {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in leaves}

    def structure(stage: optax.GradientTransformation) -> Any:
        return jax.tree.structure(_shapes_of(stage, params))

    origin = numbers[0]
    first = described(stages[origin])
    for number in numbers[1:]:
        other = described(stages[number])
        paths = [path for path in first | other if first.get(path) != other.get(path)]
        difference = [
            f"{path} is {first.get(path, 'absent')} in stage {origin} and "
            f"{other.get(path, 'absent')} in stage {number}"
            for path in paths
        ]
        # Paths do not show nodes without leaves.
        if not difference and structure(stages[number]) != structure(stages[origin]):
            difference = [f"{structure(stages[origin])} is not {structure(stages[number])}"]
        if difference:
            raise ValueError(
                f"The stages of `{user}` share one state, so their states must have the same "
                f"structure, but {difference[0]}. Use the same wrappers, `scope` and `diagnostics` "
                "in all stages, and codecs of one `layout`, such as "
                "`codec.replace(layout='concatenated')`."
            )
    return stages[origin].init(params)


def require_last_stage(outer_axes: tuple[str, ...], axis_name: AxisName) -> None:
    """Raises if an aggregator with memory is a stage of `hierarchical` before the last one."""
    if outer_axes:
        raise ValueError(
            f"The aggregator over {axis_name!r} keeps memory, such as a residual, which would "
            f"differ over {list(outer_axes)} as well. Only the last stage of `hierarchical` may "
            "keep memory, and none if it has `outer_axes`."
        )
