"""How much of each leaf is not zero: which leaves are worth sending as sparse ones."""

import jax
import jax.numpy as jnp

from jaxcomm._base import AxisName, PyTree
from jaxcomm.aggregation._agreement import to_vector
from jaxcomm.aggregation._or_reduce import or_reduce
from jaxcomm.compression import _support
from jaxcomm.compression._support import Granularity, Parts


def _parts(shape: tuple[int, ...], granularity: Granularity) -> Parts:
    has_rows = granularity != "row" or len(shape) > 1
    return _support.parts_of(shape, granularity if has_rows else "element")


def gradient_density(
    updates: PyTree, axis_name: AxisName | None = None, *, granularity: Granularity = "row"
) -> PyTree:
    r"""The part of each leaf's rows that are not zero, of this worker or of any.

    .. math:: \rho = \frac{1}{R} \Big|\bigcup_i \{r : x_{ir} \ne 0\}\Big|

    What methods for sparse updates call `density` is the first or the second of these: largest over
    many steps, and with something added. A worker sends the bitmaps' bits, :math:`2 (n-1)/n` times
    a bit a row, if `axis_name` is given, and nothing otherwise.

    Args:
      updates: Leaves of any shape.
      axis_name: The mesh axis, or axes, over whose workers the union is taken. Default: none, the
        density of this worker's own updates.
      granularity: A part: a `"row"` (all but the first axis; of a leaf with one axis or none, a
        coordinate), an `"element"`, or a block of so many coordinates.

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
    _support.require_granularity(granularity)
    leaves, treedef = jax.tree.flatten(updates)
    if not leaves:
        return updates
    parts = [_parts(x.shape, granularity) for x in leaves]
    bitmaps, apart = to_vector([*map(_support.bitmap, leaves, parts)])
    if axis_name is not None:
        bitmaps = or_reduce(bitmaps, axis_name)
    counts = [_support.count(words).astype(jnp.float32) for words in apart(bitmaps)]
    shares = [count / max(part.number, 1) for count, part in zip(counts, parts, strict=True)]
    return jax.tree.unflatten(treedef, shares)
