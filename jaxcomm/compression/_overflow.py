"""What becomes of an update of which more is to be sent than there is room for.

Room is fixed while tracing. A codec has two forms: one drops what finds no room, the other decodes
to NaN then. Feedback takes the first, since it keeps what was dropped.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp

from jaxcomm._base import Codec, Context, Memory, PyTree

Policy: TypeAlias = Literal["nan", "drop"]

Fits: TypeAlias = Callable[[Context, PyTree], jax.Array]
"""`(context, payload)` to whether there was room for all, bool[]."""


class Overflow(NamedTuple):
    """What a codec remembers for `diagnostics=True` alone: nothing that it sends depends on it."""

    overflow: jax.Array  # int32[], coordinates or parts without room in the last step


def no_overflow() -> Overflow:
    """The memory before the first step."""
    return Overflow(jnp.zeros((), jnp.int32))


def remembers(memory: Memory) -> bool:
    """Whether anything that is sent depends on the memory."""
    parts = jax.tree.leaves(memory, is_leaf=lambda part: isinstance(part, Overflow))
    return not all(isinstance(part, Overflow) for part in parts)


def tell_overflow(overflow: jax.Array) -> dict[str, jax.Array]:
    """For `totals`."""
    return {"overflow": overflow.astype(jnp.float32)}


def choose_form(overflow: Policy, *, drop_overflow: Codec, strict: Codec) -> Codec:
    """The form that is asked for, the strict one with the other at hand for feedback.

    Raises:
      ValueError: If it is neither.
    """
    if overflow not in get_args(Policy):
        raise ValueError(f"`overflow` must be one of {get_args(Policy)}, got {overflow!r}.")
    return drop_overflow if overflow == "drop" else strict._replace(drop_overflow=drop_overflow)


def nan_unless(fits: jax.Array, x: jax.Array) -> jax.Array:
    """`x`, or NaN in all of it."""
    return jnp.where(fits, x, jnp.nan)


def decoded_to_nan(codec: Codec, fits: Fits) -> Codec:
    """The strict form of a codec whose receivers know whether all had room."""

    def decode(context: Context, payload: PyTree) -> jax.Array:
        return nan_unless(fits(context, payload), codec.decode(context, payload))

    return codec._replace(decode=decode)


def sent_as_nan(codec: Codec) -> Codec:
    """The strict form of a codec whose sender alone knows: its values leave as NaN."""

    def encode(context: Context, x: jax.Array) -> tuple[PyTree, Memory]:
        payload, after = codec.encode(context, x)
        values = nan_unless(after.own.overflow == 0, payload.values)
        return payload._replace(values=values.astype(payload.values.dtype)), after

    return codec._replace(encode=encode)
