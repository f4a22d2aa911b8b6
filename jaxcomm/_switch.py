"""Running one of several transformations, and all that it sends, the same on every worker."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _axis
from jaxcomm._base import PyTree


def collective_switch(index: jax.Array, branches: Sequence[Callable[[], PyTree]]) -> PyTree:
    """`branches[index]()`: one branch runs, so that what the others send is not sent.

    All are typed as varying over the axes over which any of them does.

    Args:
      index: int32[], equal on all workers: where it were not, some would wait for the others
        forever. Beyond the branches, the nearest one runs.
      branches: They close over their operands, and return the same structure, shapes and dtypes.

    Raises:
      ValueError: If the index differs by worker (checked mode only).
    """
    if differs := sorted(_axis.varying(index)):
        raise ValueError(f"Workers must run alike, and the condition differs by {differs}.")

    def axes_of(*alike: jax.ShapeDtypeStruct) -> frozenset[str]:
        return frozenset().union(*(x.manual_axis_type.varying for x in alike if x.manual_axis_type))

    shapes = [jax.tree.leaves(jax.eval_shape(branch)) for branch in branches]
    axes = [*map(axes_of, *shapes)]

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

    return lax.switch(index, [lambda run=run: aligned(run()) for run in branches])


def collective_cond(
    flag: jax.Array, run: Callable[[], PyTree], instead: Callable[[PyTree], PyTree]
) -> PyTree:
    """`run()` where `flag`, else `instead(shapes)`, of the shapes and dtypes that `run` returns.

    Args:
      flag: bool[], equal on all workers.
      run: Closes over its operands.
      instead: Must not send.

    Raises:
      ValueError: If the flag differs by worker (checked mode only).
    """
    shapes = jax.eval_shape(run)
    return collective_switch(flag.astype(jnp.int32), [lambda: instead(shapes), run])
