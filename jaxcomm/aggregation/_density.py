"""The nonzero fraction of each leaf, which shows where sparse methods save bytes."""

import jax
import jax.numpy as jnp

from jaxcomm._axis import names_itself
from jaxcomm._contract import AxisName, PyTree
from jaxcomm.aggregation._exchange import or_reduce, to_vector
from jaxcomm.compression import _support
from jaxcomm.compression._support import Granularity, Parts


def _parts(shape: tuple[int, ...], granularity: Granularity) -> Parts:
    has_rows = granularity != "row" or len(shape) > 1
    return _support.parts_of(shape, granularity if has_rows else "element")


@names_itself
def gradient_density(
    updates: PyTree, *, axis_name: AxisName | None = None, granularity: Granularity = "row"
) -> PyTree:
    r"""The fraction of nonzero rows in each leaf, on this worker or on any worker.

    .. math:: \rho = \frac{1}{R} \Big|\bigcup_i \{r : x_{ir} \ne 0\}\Big|

    Use it to choose the option `density` of the methods for sparse updates: take the maximum over
    many steps and add a margin. The method's docstring says whether it needs the density of one
    worker or of the union. With `axis_name`, a worker sends :math:`2 (n-1)/n` times one bit per
    row. Otherwise it sends nothing.

    Args:
      updates: Leaves of any shape.
      axis_name: The mesh axis, or axes, of the workers in the union. Default: none, the density of
        this worker's updates.
      granularity: The part that is counted: a `"row"` (a slice along the first axis; for a leaf
        with at most one axis, a coordinate), an `"element"`, or an int, a block of that many
        coordinates.

    Returns:
      A tree like `updates` of float32[], in [0, 1]; 0 for an empty leaf.

    Raises:
      ValueError: If `granularity` is none of these.

    Example:
      >>> import jax.numpy as jnp, jaxcomm
      >>> gradients = {"embedding": jnp.zeros((8, 3)).at[2].set(1.0), "bias": jnp.ones(4)}
      >>> jaxcomm.gradient_density(gradients)["embedding"].item()
      0.125
    """
    leaves, treedef = jax.tree.flatten(updates)
    if not leaves:
        return updates
    parts = [_parts(x.shape, granularity) for x in leaves]
    bitmaps, split = to_vector([*map(_support.bitmap, leaves, parts)])
    if axis_name is not None:
        bitmaps = or_reduce(bitmaps, axis_name=axis_name)
    counts = [_support.count(words).astype(jnp.float32) for words in split(bitmaps)]
    densities = [count / max(part.number, 1) for count, part in zip(counts, parts, strict=True)]
    return jax.tree.unflatten(treedef, densities)
