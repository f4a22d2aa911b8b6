"""What a codec tells of blocks or rows, joined to what it tells of the whole."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm._base import Diagnostics


def diagnose_each(diagnose: Callable[..., Diagnostics], *each: Any) -> Diagnostics:
    """What `diagnose` tells of each along the first axes, together; targets lie side by side."""
    constants: dict[str, float] = {}

    def of_one(*one: Any) -> Diagnostics:
        told = diagnose(*one)
        constants.update(told.constants)
        return told._replace(constants={})  # They are no arrays.

    told = jax.vmap(of_one)(*each)
    peak = jnp.max(jnp.abs(told.target), initial=0)
    scaled = told.target / jnp.where(peak > 0, peak, 1)  # Lest squares overflow.
    squares = jnp.sum(jnp.square(scaled), axis=range(1, scaled.ndim))
    whole = jnp.sum(squares)
    shares = squares / jnp.where(whole > 0, whole, 1)
    return Diagnostics(
        told.target,
        jax.tree.map(jnp.sum, told.totals),
        jax.tree.map(jnp.sum, told.ratios),
        jax.tree.map(lambda error: jnp.sum(shares * error), told.errors),
        constants,
    )
