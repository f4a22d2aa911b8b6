"""Combines the estimates of the rows into one estimate per coordinate."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def total(values: Sequence[jax.Array]) -> jax.Array:
    """The sum over rows, in their order, float32."""
    result = values[0].astype(jnp.float32)
    for value in values[1:]:
        result = result + value.astype(jnp.float32)
    return result


def mean(values: Sequence[jax.Array]) -> jax.Array:
    """The mean over rows, float32.

    It uses a multiplication, because backends round a quotient differently.
    """
    return total(values) * jnp.float32(1 / len(values))


def median(values: Sequence[jax.Array]) -> jax.Array:
    """The median over rows, of their dtype; the midpoint of the middle two for an even number.

    Neighbors are exchanged (minimum to the left, maximum to the right), in as many rounds as rows.
    One NaN makes the median NaN. A midpoint of int32 is rounded down.
    """
    rows = list(values)
    for round_ in range(len(rows)):
        for i in range(round_ % 2, len(rows) - 1, 2):
            first, second = rows[i], rows[i + 1]
            in_order = first <= second
            rows[i] = jnp.where(in_order, first, second)
            rows[i + 1] = jnp.where(in_order, second, first)
    middle = rows[len(rows) // 2]
    if len(rows) % 2 == 0:
        below = rows[len(rows) // 2 - 1]
        if jnp.issubdtype(middle.dtype, jnp.integer):
            middle = (below & middle) + ((below ^ middle) >> 1)
        else:
            middle = (below + middle) * jnp.float32(0.5)
    if jnp.issubdtype(middle.dtype, jnp.floating):
        # Comparisons with NaN are false, so the exchanges may lose a NaN.
        for value in values:
            middle = jnp.where(value == value, middle, jnp.nan)
    return middle


ESTIMATES = {"mean": mean, "median": median, "sum": total}
"""How the estimates of the rows are combined, by name."""
