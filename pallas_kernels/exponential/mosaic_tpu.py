"""`encode`, `decode` and `add` as Pallas kernels for TPU: one pass over memory.

Arrays are viewed as rows of 128 lanes. Sizes that do not fill their rows are padded, which costs an
extra pass.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import _hash, _vma
from pallas_kernels._configs import PerBlock
from pallas_kernels.exponential import reference

LANES = 128


@dataclasses.dataclass(frozen=True)
class Config(PerBlock):
    """There is one plane."""


def _noise(seeds_ref: Any, rows: int) -> jax.Array:
    row = lax.broadcasted_iota(jnp.uint32, (rows, LANES), 0)
    lane = lax.broadcasted_iota(jnp.uint32, (rows, LANES), 1)
    first = (pl.program_id(0) * rows).astype(jnp.uint32)
    position = (first + row) * jnp.uint32(LANES) + lane
    return _hash.bits(position, seeds_ref[0, 0], seeds_ref[0, 1])


def _elementwise(
    kernel: Callable[..., None],
    scalars: list[jax.Array],
    arrays: list[jax.Array],
    dtype: jax.typing.DTypeLike,
    config: Config | None,
    interpret: Any,
) -> jax.Array:
    """Calls `kernel` on blocks of rows of `arrays`, which have one shape."""
    shape, size = arrays[0].shape, arrays[0].size
    if size == 0:
        return arrays[0].astype(dtype)
    rows_of = lambda x: jnp.pad(x.ravel(), (0, -size % LANES)).reshape(-1, LANES)  # noqa: E731
    operands = _vma.equally_varying(*(x.reshape(1, -1) for x in scalars), *map(rows_of, arrays))
    rows = operands[-1].shape[0]
    block = min((config or Config.of(arrays[0].dtype)).rows, rows)
    spec = pl.BlockSpec((block, LANES), lambda i: (i, 0))
    scalar_specs = [pl.BlockSpec(memory_space=pltpu.SMEM)] * len(scalars)
    result = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows, block),),
        in_specs=[*scalar_specs, *[spec] * len(arrays)],
        out_specs=spec,
        out_shape=_vma.like(operands[-1], (rows, LANES), dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
    )(*operands)
    return result.ravel()[:size].reshape(shape)


def _encode_kernel(
    seeds_ref: Any, factors_ref: Any, x_ref: Any, out_ref: Any, *, headroom: int
) -> None:
    noise = _noise(seeds_ref, x_ref.shape[0])
    x = x_ref[...].astype(jnp.float32)
    lift, factor = factors_ref[0, 0], factors_ref[0, 1]
    codes = reference.round_to_powers(x, lift, factor, noise, headroom)
    out_ref[...] = codes.astype(jnp.uint8)


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
    codes = codes_ref[...].astype(jnp.uint32)
    out_ref[...] = reference.magnitudes(codes, headroom, count) * scale_ref[0, 0]


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
    noise = _noise(seeds_ref, a_ref.shape[0])
    a, b = a_ref[...].astype(jnp.uint32), b_ref[...].astype(jnp.uint32)
    out_ref[...] = reference.add_codes(a, b, noise).astype(jnp.uint8)


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
