"""Branches that may contain collectives: all workers run the same one."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _axis
from jaxcomm._base import PyTree
from jaxcomm._sharded import explicit_spec


def collective_switch(index: jax.Array, branches: Sequence[Callable[[], PyTree]]) -> PyTree:
    """Runs `branches[index]()` only, so that the other branches send nothing.

    Each result is typed as varying over all axes over which it varies in any branch. Over Explicit
    axes, it is sharded as in the first branch whose result is sharded.

    Args:
      index: int32[], equal on all workers. Otherwise some workers would wait for the others
        forever. An index out of range is clamped.
      branches: Functions that close over their operands, and return the same structure, shapes and
        dtypes.

    Raises:
      ValueError: If the index differs by worker (checked mode only).
    """
    if differs := sorted(_axis.varying(index)):
        raise ValueError(
            f"All workers must run the same branch, but the condition differs over {differs}. If "
            "`jaxcomm.accumulate` is inside the inner optimizer of `diloco` or inside "
            "`jaxcomm.per_worker`, wrap the whole instead, as in `jaxcomm.accumulate(diloco(...), "
            "k)`; likewise other transformations that may skip a step."
        )

    def axes_of(*shapes: jax.ShapeDtypeStruct) -> frozenset[str]:
        types = [x.manual_axis_type for x in shapes]
        return frozenset().union(*(type_.varying for type_ in types if type_))

    shapes = [jax.tree.leaves(jax.eval_shape(branch)) for branch in branches]
    axes = [*map(axes_of, *shapes)]
    shardings = [*map(explicit_spec, *shapes)]

    def aligned(tree: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(tree)
        missing = [
            tuple(sorted(one - _axis.varying(x))) for one, x in zip(axes, leaves, strict=True)
        ]
        cast = [
            lax.pcast(x, over, to="varying") if over else x
            for x, over in zip(leaves, missing, strict=True)
        ]
        resharded = [
            x if sharding is None else jax.sharding.reshard(x, sharding)
            for x, sharding in zip(cast, shardings, strict=True)
        ]
        return jax.tree.unflatten(treedef, resharded)

    return lax.switch(index, [lambda run=run: aligned(run()) for run in branches])


def collective_cond(
    flag: jax.Array, run: Callable[[], PyTree], instead: Callable[[PyTree], PyTree]
) -> PyTree:
    """`run()` if `flag`, else `instead(shapes)` with the shapes and dtypes that `run` returns.

    Args:
      flag: bool[], equal on all workers.
      run: A function that closes over its operands.
      instead: A function that must not send.

    Raises:
      ValueError: If the flag differs by worker (checked mode only).
    """
    shapes = jax.eval_shape(run)
    return collective_switch(flag.astype(jnp.int32), [lambda: instead(shapes), run])
