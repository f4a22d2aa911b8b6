"""The union of the workers' bitmaps."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _axis, _collectives
from jaxcomm._axis import names_itself
from jaxcomm._contract import AxisName


@names_itself
def or_reduce(words: jax.Array, axis_name: AxisName = "data") -> jax.Array:
    r"""The bitwise OR over workers of packed words.

    .. math:: y = x_1 \mathbin{|} x_2 \mathbin{|} \dots \mathbin{|} x_n

    Each of :math:`n` workers receives one :math:`n`-th of the words from all others and computes
    their OR; then all workers gather the parts. A worker sends :math:`2 (n-1)/n` times the bytes of
    `words`, whose number is padded to a multiple of :math:`n`. With :math:`n = 1` it sends nothing.
    `lax.psum` cannot replace this function: if two workers set the same bit, the sum carries into
    the next bit, and sums without carry need :math:`\log_2(n + 1)` bits per bit of the map.

    Args:
      words: Unsigned integers of any shape and width that hold a packed bitmap. For a bool mask,
        use `jnp.packbits(mask)`.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      The OR of the words of all workers, in the shape and dtype of `words`, equal on all workers.

    Raises:
      ValueError: If `words` are not unsigned integers or `axis_name` is not bound.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> masks = jnp.array([[0b0001, 0b1000], [0b0011, 0b0000]], jnp.uint32)
      >>> print(jax.vmap(jaxcomm.or_reduce, axis_name="data")(masks))
      [[3 8]
       [3 8]]
    """
    words = jnp.asarray(words)
    if words.dtype == jnp.bool_:
        raise ValueError(
            "`words` is bool, and each bool would travel as one byte. Pack it with "
            "`jnp.packbits(mask.ravel())`; `jnp.unpackbits(words, count=mask.size)` unpacks it."
        )
    if not jnp.issubdtype(words.dtype, jnp.unsignedinteger):
        raise ValueError(
            f"`words` must be packed in unsigned integers, such as uint32, got {words.dtype}."
        )
    workers = _axis.size(axis_name)
    if words.size == 0:
        # Sends nothing, and types the result as equal on all workers.
        return lax.psum(words, axis_name)
    width = math.ceil(words.size / workers)
    rows = jnp.pad(words.ravel(), (0, workers * width - words.size)).reshape(workers, width)
    received = _collectives.exchange(rows, axis_name)
    part = lax.reduce(received, jnp.zeros((), words.dtype), lax.bitwise_or, (0,))
    return _collectives.gather(part, axis_name).ravel()[: words.size].reshape(words.shape)
