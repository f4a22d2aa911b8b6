"""Combines a codec's diagnostics of several blocks or rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm._contract import Diagnostics
from jaxcomm.compression._means import over_peak


def diagnose_each(diagnose: Callable[..., Diagnostics], *each: Any) -> Diagnostics:
    """Maps `diagnose` over the leading axes and reduces the results; the targets stay stacked."""
    constants: dict[str, float] = {}

    def diagnose_one(*args: Any) -> Diagnostics:
        diagnostics = diagnose(*args)
        constants.update(diagnostics.constants)
        return diagnostics._replace(constants={})  # Constants are not arrays.

    diagnostics = jax.vmap(diagnose_one)(*each)
    peak = jnp.max(jnp.abs(diagnostics.target), initial=0)
    scaled = over_peak(diagnostics.target, peak)  # So that squares do not overflow.
    squares = jnp.sum(jnp.square(scaled), axis=range(1, scaled.ndim))
    whole = jnp.sum(squares)
    shares = squares / jnp.where(whole > 0, whole, 1)
    return Diagnostics(
        diagnostics.target,
        jax.tree.map(jnp.sum, diagnostics.totals),
        jax.tree.map(jnp.sum, diagnostics.ratios),
        jax.tree.map(lambda error: jnp.sum(shares * error), diagnostics.errors),
        constants,
    )
