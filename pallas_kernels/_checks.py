"""Argument checks that the ops share."""

import functools
from typing import NoReturn

import jax
import jax.numpy as jnp


def require(condition: bool, message: str) -> None:
    """Raises ValueError with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def require_scalar(name: str, x: jax.Array) -> None:
    """Raises unless `x` is float32[]."""
    require(
        x.dtype == jnp.float32 and x.shape == (),
        f"`{name}` must be float32[], got {x.dtype}{list(x.shape)}.",
    )


def require_seeds(seeds: jax.Array) -> None:
    """Raises unless `seeds` is uint32[2]."""
    require(
        seeds.dtype == jnp.uint32 and seeds.shape == (2,),
        f"`seeds` must be uint32[2], got {seeds.dtype}{list(seeds.shape)}.",
    )


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
