"""Both ops with the named or selected implementation, and their gradients.

Up to a factor, each op is the transpose of the other.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch
from pallas_kernels._preference import preferred
from pallas_kernels.count_sketch import elements

MOST_ROWS_OF_KERNELS = 9  # For decoding.


def _run(
    function: str,
    hashing: str,
    implementation: Any,
    size: int,
    *arrays: jax.Array,
    **options: Any,
) -> jax.Array:
    """Runs `function` of the named or selected implementation."""
    names, source = preferred(implementation)
    only_kernels = bool(names) and "reference" not in names
    if hashing == "elements":
        if only_kernels:
            raise NotImplementedError(
                f'{source}={", ".join(names)!r} has no kernel for `hashing`="elements": '
                "Mosaic GPU has no atomic addition at indices, and Mosaic TPU has no scatter. "
                'Use `hashing`="tiles".'
            )
        return getattr(elements, function)(*arrays, **options)
    rows = arrays[0].shape[0] if function == "decode" else 1
    if rows > MOST_ROWS_OF_KERNELS:
        if only_kernels:
            raise NotImplementedError(
                f"{source}={', '.join(names)!r} decodes at most {MOST_ROWS_OF_KERNELS} rows, "
                f"got {rows}: use fewer rows or `implementation`='reference'."
            )
        implementation = "reference"
    return _dispatch.run("count_sketch", function, implementation, size, *arrays, **options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def encode(x: jax.Array, seeds: jax.Array, options: Any) -> jax.Array:
    """See `api.encode`; `options` are rows, columns, hashing, implementation."""
    rows, columns, hashing, implementation = options
    sizes = {"rows": rows, "columns": columns}
    return _run("encode", hashing, implementation, x.size, x, seeds, **sizes)


def _encode_forward(x: jax.Array, seeds: jax.Array, options: Any) -> Any:
    return encode(x, seeds, options), (seeds, jnp.zeros_like(x, shape=(0, *x.shape)))


def _encode_backward(options: Any, saved: Any, cotangent: jax.Array) -> Any:
    seeds, empty = saved
    if empty.dtype == jnp.int32:
        return None, None
    _, _, hashing, implementation = options
    sums = decode(cotangent, seeds, (empty.shape[1:], "sum", hashing, implementation))
    return sums.astype(empty.dtype), None


encode.defvjp(_encode_forward, _encode_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def decode(table: jax.Array, seeds: jax.Array, options: Any) -> jax.Array:
    """See `api.decode`; `options` are shape, estimate (or "sum"), hashing, implementation."""
    shape, estimate, hashing, implementation = options
    size = math.prod(shape)
    options = {"shape": shape, "estimate": estimate}
    return _run("decode", hashing, implementation, size, table, seeds, **options)


def _decode_forward(table: jax.Array, seeds: jax.Array, options: Any) -> Any:
    if options[1] == "median":
        raise TypeError(
            '`count_sketch.decode` with `estimate`="median" has no gradient. Use "mean", or hide '
            "the table behind `jax.lax.stop_gradient`."
        )
    return decode(table, seeds, options), (seeds, jnp.zeros_like(table, shape=(0, *table.shape)))


def _decode_backward(options: Any, saved: Any, cotangent: jax.Array) -> Any:
    seeds, empty = saved
    _, estimate, hashing, implementation = options
    _, rows, columns = empty.shape
    if empty.dtype == jnp.int32:
        return None, None
    table = encode(cotangent, seeds, (rows, columns, hashing, implementation))
    return table if estimate == "sum" else table * jnp.float32(1 / rows), None


decode.defvjp(_decode_forward, _decode_backward)
