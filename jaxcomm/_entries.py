"""Decoding to a few values among zeros, without a dense array."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm._base import Codec, Context, PyTree


class Entries(NamedTuple):
    """The entries of an array that may be nonzero."""

    indices: jax.Array  # uint32[k], into the flat array; distinct, except those out of range
    values: jax.Array  # float32[k]; values with indices out of range are ignored


def scatter(entries: Entries, shape: tuple[int, ...]) -> jax.Array:
    """float32 zeros with the values added at the indices; indices out of range are dropped."""
    size = math.prod(shape)
    zeros = jnp.zeros(max(size, 1), jnp.float32)  # `at` needs an element.
    dense = zeros.at[entries.indices].add(entries.values, mode="drop")
    return dense[:size].reshape(shape)


@dataclasses.dataclass(frozen=True)
class SparseDecode:
    r"""The `decode` of a codec whose payload decodes to a few values among zeros.

    .. math:: \mathrm{decode}(\text{context}, \text{payload}) = \sum_j v_j e_{i_j}

    Call it like any `decode`; it returns float32[context.shape]. Gathered means and feedback use
    its entries instead, and make no dense copy. A wrapper that decodes differently must replace
    the `SparseDecode` as a whole.

    Attributes:
      entries: `(context, payload) -> Entries`, the mean over `context.count`.

    Example:
      >>> from typing import NamedTuple
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm import Codec, Context, Entries, SparseDecode
      >>> class First(NamedTuple):
      ...     value: jax.Array
      >>> first = Codec(
      ...     encode=lambda context, x: (First(x.ravel()[:1]), context.memory),
      ...     decode=SparseDecode(
      ...         lambda context, payload: Entries(
      ...             jnp.zeros(1, jnp.uint32), payload.value / context.count
      ...         )
      ...     ),
      ... )
      >>> x = jnp.array([3.0, 1.0])
      >>> payload, _ = first.encode(Context.of(x), x)
      >>> print(first.decode(Context.of(x), payload))
      [3. 0.]
    """

    entries: Callable[[Context, PyTree], Entries]

    def __call__(self, context: Context, payload: PyTree) -> jax.Array:
        """The dense array."""
        return scatter(self.entries(context, payload), context.shape)


def entries_of(codec: Codec) -> Callable[[Context, PyTree], Entries] | None:
    """`(context, payload) -> Entries` if the codec has a `SparseDecode`, else `None`."""
    return codec.decode.entries if isinstance(codec.decode, SparseDecode) else None
