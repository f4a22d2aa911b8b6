"""What a codec does with an update that exceeds its capacity.

The capacity is fixed at trace time. A codec has two forms: one drops what exceeds the capacity, the
other then decodes to NaN. Feedback uses the first form, since it keeps what was dropped.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxcomm._contract import Codec, Context, Diagnostics, Fast, Memory, PyTree

Policy: TypeAlias = Literal["nan", "drop"]


class Overflow(NamedTuple):
    """The `Memory.report` of a codec with a capacity."""

    overflow: jax.Array  # int32[], coordinates or parts beyond the capacity in this step


def overflow_totals(after: Memory) -> dict[str, jax.Array]:
    """The overflow of a step as `Diagnostics.totals`; 0 before the first one."""
    overflow = after.report.overflow if after.report else jnp.zeros((), jnp.int32)
    return {"overflow": overflow.astype(jnp.float32)}


def diagnose_overflow(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
    """The `diagnose` of a codec with a capacity."""
    return Diagnostics(x, totals=overflow_totals(after))


def choose_form(overflow: Policy, drop_overflow: Codec, strict: Codec) -> Codec:
    """Returns the form that the option `overflow` names; the strict form also holds the other."""
    return drop_overflow if overflow == "drop" else strict.replace(drop_overflow=drop_overflow)


def nan_unless(fits: jax.Array, x: jax.Array) -> jax.Array:
    """`x` if `fits`, else NaN everywhere."""
    return jnp.where(fits, x, jnp.nan)


def decoded_to_nan(codec: Codec, fits: Callable[[Context, PyTree], jax.Array]) -> Codec:
    """The strict form of a codec whose receivers can compute whether the capacity sufficed.

    Args:
      codec: The form that drops what exceeds the capacity.
      fits: `(context, payload) -> bool[]`, whether the capacity sufficed.
    """

    def decode(context: Context, payload: PyTree) -> jax.Array:
        return nan_unless(fits(context, payload), codec.decode(context, payload))

    return codec.replace(decode=decode)


def sent_as_nan(codec: Codec) -> Codec:
    """The strict form of a codec whose sender alone can compute that; it sends NaN values."""

    def encode(context: Context, x: jax.Array) -> tuple[PyTree, Memory]:
        payload, after = codec.encode(context, x)
        values = nan_unless(after.report.overflow == 0, payload.values)
        return payload._replace(values=values.astype(payload.values.dtype)), after

    return codec.replace(encode=encode, fast=Fast(entries=codec.fast.entries))
