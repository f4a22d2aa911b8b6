"""A codec of several arrays of one shape, encoded independently, and their diagnostics."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm._contract import Codec, Diagnostics
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


def stacked(codec: Codec) -> Codec:
    r"""Encodes each row of `[rows, *shape]` with separate coins, memory and statistics.

    .. math:: Q(x_1, x_2, \ldots) = (Q(x_1), Q(x_2), \ldots)

    All rows share one vectorized program: one copy per row would take longer to compile, the more
    rows there are. All arrays of a context have one more leading dimension; its `shape` is that of
    one row.
    """
    return codec.replace(
        init=jax.vmap(codec.init),
        measure=jax.vmap(codec.measure),
        encode=jax.vmap(codec.encode),
        decode=jax.vmap(codec.decode),
        finalize=jax.vmap(codec.finalize),
        diagnose=lambda *args: diagnose_each(codec.diagnose, *args),
        drop_overflow=codec.drop_overflow and stacked(codec.drop_overflow),
    )
