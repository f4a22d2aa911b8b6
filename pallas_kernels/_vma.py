"""Types of kernel operands inside `jax.shard_map` with `check_vma=True`.

The type of a kernel's result must list the mesh axes over which it varies, and all operands of a
kernel must vary over the same axes.
"""

import jax
from jax import lax


def _varying(x: jax.Array) -> frozenset[str]:
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def _vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    missing = tuple(sorted(axes - _varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def equally_varying(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays, each typed as varying over every axis that any of them varies over."""
    union = frozenset[str]().union(*map(_varying, arrays))
    return tuple(_vary(x, union) for x in arrays)


def like(x: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.ShapeDtypeStruct:
    """The type of a kernel's result that varies as its operand `x` does."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def declared(x: jax.Array, struct: jax.ShapeDtypeStruct) -> jax.Array:
    """`x`, typed as varying over the axes that `struct`, from `like`, declares."""
    declared_type = struct.manual_axis_type
    return _vary(x, frozenset(declared_type.varying)) if declared_type else x
