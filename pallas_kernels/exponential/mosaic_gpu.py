"""`encode`, `decode` and `add` as Mosaic GPU kernels, for Hopper and newer: one pass over memory.

Arrays are viewed as rows, one for each block of 128 threads. Sizes that do not fill their rows are
padded, which costs an extra pass.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _hash, _vma
from pallas_kernels._configs import PerThread
from pallas_kernels._gpu import gpu_kernel, require_int32
from pallas_kernels.exponential import reference


@dataclasses.dataclass(frozen=True)
class Config(PerThread):
    """A block of threads processes one row."""


def _noise(seeds_ref: Any, block: int) -> jax.Array:
    row = lax.axis_index("row").astype(jnp.uint32)
    position = row * jnp.uint32(block) + lax.iota(jnp.uint32, block)
    return _hash.bits(position, seeds_ref[0], seeds_ref[1])


def _elementwise(
    kernel: Callable[..., None],
    scalars: list[jax.Array],
    arrays: list[jax.Array],
    dtype: jax.typing.DTypeLike,
    config: Config | None,
    interpret: Any,
) -> jax.Array:
    """Calls `kernel` on rows of `arrays`, which have one shape."""
    shape, size = arrays[0].shape, arrays[0].size
    require_int32(size)
    if size == 0:
        return arrays[0].astype(dtype)
    block = (config or Config.of(arrays[0].dtype)).block
    rows_of = lambda x: jnp.pad(x.ravel(), (0, -size % block)).reshape(-1, block)  # noqa: E731
    operands = _vma.equally_varying(*(x.reshape(-1) for x in scalars), *map(rows_of, arrays))
    rows = operands[-1].shape[0]
    result = gpu_kernel(
        kernel,
        out_type=_vma.like(operands[-1], (rows, block), dtype),
        grid={"row": rows},
        interpret=interpret,
    )(*operands)
    return result.ravel()[:size].reshape(shape)


def _encode_kernel(
    seeds_ref: Any, factors_ref: Any, x_ref: Any, out_ref: Any, *, headroom: int
) -> None:
    row = lax.axis_index("row")
    x = x_ref[row].astype(jnp.float32)
    codes = reference.round_to_powers(
        x, factors_ref[0], factors_ref[1], _noise(seeds_ref, x_ref.shape[1]), headroom
    )
    out_ref[row] = codes.astype(jnp.uint8)


def encode(
    x: jax.Array,
    scale: jax.Array,
    seeds: jax.Array,
    *,
    headroom: int,
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See `reference.encode`."""
    factors = jnp.stack(reference.factors(scale, headroom))
    kernel = functools.partial(_encode_kernel, headroom=headroom)
    return _elementwise(kernel, [seeds, factors], [x], jnp.uint8, config, interpret)


def _decode_kernel(
    scale_ref: Any, codes_ref: Any, out_ref: Any, *, headroom: int, count: int
) -> None:
    row = lax.axis_index("row")
    codes = codes_ref[row].astype(jnp.uint32)
    out_ref[row] = reference.magnitudes(codes, headroom, count) * scale_ref[0]


def decode(
    codes: jax.Array,
    scale: jax.Array,
    *,
    headroom: int,
    count: int,
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See `reference.decode`."""
    kernel = functools.partial(_decode_kernel, headroom=headroom, count=count)
    return _elementwise(kernel, [scale], [codes], jnp.float32, config, interpret)


def _add_kernel(seeds_ref: Any, a_ref: Any, b_ref: Any, out_ref: Any) -> None:
    row = lax.axis_index("row")
    a, b = a_ref[row].astype(jnp.uint32), b_ref[row].astype(jnp.uint32)
    out_ref[row] = reference.add_codes(a, b, _noise(seeds_ref, a_ref.shape[1])).astype(jnp.uint8)


def add(
    a: jax.Array,
    b: jax.Array,
    seeds: jax.Array,
    *,
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See `reference.add`."""
    return _elementwise(_add_kernel, [seeds], [a, b], jnp.uint8, config, interpret)
