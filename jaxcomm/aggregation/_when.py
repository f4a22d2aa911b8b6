"""Running a transformation, and all that it sends, only where every worker does."""

from collections.abc import Callable

import jax
from jax import lax

from jaxcomm import _axis
from jaxcomm._base import PyTree


def run_when(
    flag: jax.Array, run: Callable[[], PyTree], instead: Callable[[PyTree], PyTree]
) -> PyTree:
    """`run()` where `flag`, else `instead(shapes)`, of the shapes and dtypes that `run` returns.

    One branch runs, so that what `run` sends is not sent elsewhere. Both are typed as varying over
    the axes over which either does.

    Args:
      flag: bool[], equal on all workers: where it were not, some would wait for the others forever.
      run: Closes over its operands.
      instead: Must not send.

    Raises:
      ValueError: If the flag differs by worker (checked mode only).
    """
    if differs := sorted(_axis.varying(flag)):
        raise ValueError(f"Workers must run alike, and the condition differs by {differs}.")
    shapes = jax.eval_shape(run)
    others = jax.eval_shape(lambda: instead(shapes))

    def axes_of(one: jax.ShapeDtypeStruct, other: jax.ShapeDtypeStruct) -> frozenset[str]:
        return frozenset().union(
            *(x.manual_axis_type.varying for x in (one, other) if x.manual_axis_type)
        )

    axes = [*map(axes_of, *map(jax.tree.leaves, (shapes, others)))]

    def aligned(tree: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(tree)
        missing = [
            tuple(sorted(one - _axis.varying(x))) for one, x in zip(axes, leaves, strict=True)
        ]
        cast = [
            lax.pcast(x, over, to="varying") if over else x
            for x, over in zip(leaves, missing, strict=True)
        ]
        return jax.tree.unflatten(treedef, cast)

    return lax.cond(flag, lambda: aligned(run()), lambda: aligned(instead(shapes)))
