"""Rounding has no gradient, and says so."""

import functools
from typing import NoReturn

import jax


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _identity(op: str, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return arrays


@_identity.defjvp
def _no_gradient(
    op: str, primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> NoReturn:
    raise TypeError(
        f"`{op}` rounds, so it has no gradient. Take the gradient first and quantize it, or hide "
        "the argument behind `jax.lax.stop_gradient`."
    )


def nondifferentiable(op: str, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the arrays; differentiating with respect to them raises TypeError that names `op`."""
    return _identity(op, *arrays)
