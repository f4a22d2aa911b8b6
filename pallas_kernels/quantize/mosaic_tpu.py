"""`quantize` and `dequantize` as Pallas kernels for TPU: one pass over memory.

An array is read and written in its own layout if its last axis is a multiple of 128, and the
product of its other axes is a multiple that planes and tiles need. Other arrays are viewed as rows
of 128 numbers. This view is free for a one-dimensional array whose planes are multiples of 1024.
Otherwise it costs a pass before the kernel, and one after it for each result of the same shape.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import _hash, _vma
from pallas_kernels._configs import TILE, PerBlock, require_field
from pallas_kernels.quantize import reference

LANES = 128


@dataclasses.dataclass(frozen=True)
class Config(PerBlock):
    """By default a block has half a megabyte of float32."""

    columns: int = 1024  # The most columns of a block: a multiple of 128, at most 4096.

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = range(LANES, 4096 + 1, LANES)
        require_field("columns", self.columns, allowed, "a multiple of 128 in 128 to 4096")


class _View(NamedTuple):
    """An array as [planes, rows, columns], and its division into blocks."""

    planes: int
    width: int  # Elements of a plane without padding.
    rows: int
    columns: int
    config: Config

    @property
    def pitch(self) -> int:
        return self.rows * self.columns

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.planes, self.rows, self.columns

    @property
    def block(self) -> tuple[int, int]:
        most = self.config.rows * LANES // (TILE * self.planes)
        most = max(LANES, min(self.config.columns, most))
        columns = max(c for c in range(LANES, most + 1, LANES) if self.columns % c == 0)
        return min(self.config.rows_of_plane(self.planes, columns), self.rows), columns

    @property
    def grid(self) -> tuple[int, int]:
        rows, columns = self.block
        return pl.cdiv(self.rows, rows), self.columns // columns

    @property
    def spec(self) -> pl.BlockSpec:
        return pl.BlockSpec((self.planes, *self.block), lambda i, j: (0, i, j))

    @property
    def word_spec(self) -> pl.BlockSpec:
        return pl.BlockSpec(self.block, lambda i, j: (i, j))


def _view(shape: tuple[int, ...], bits: int, config: Config) -> _View:
    planes, width = reference.layout(math.prod(shape), bits)
    if len(shape) >= 2 and shape[-1] % LANES == 0:
        rows = math.prod(shape[:-1])
        if planes == 1 or rows % (planes * 8) == 0:
            return _View(planes, width, rows // planes, shape[-1], config)
    return _View(planes, width, pl.cdiv(width, 8 * LANES) * 8, LANES, config)


def _progression(view: _View, stride: jax.Array, start: jax.Array) -> jax.Array:
    """`start + stride * j`, uint32, where j counts elements of the plane from the block's first.

    Multiplied is one tile. Each next one is a sum of the one before it and of a number.
    """
    rows, columns = view.block
    height = 8 if rows % 8 == 0 else rows
    row, column = (lax.broadcasted_iota(jnp.uint32, (height, columns), axis) for axis in range(2))
    tiles = [start + row * (jnp.uint32(view.columns) * stride) + column * stride]
    step = jnp.uint32(height * view.columns) * stride
    while len(tiles) < rows // height:
        tiles.append(tiles[-1] + step)
    return jnp.concatenate(tiles)


def _store(ref: Any, codes: jax.Array, interpret: Any) -> None:
    """Stores int32 `codes` as the dtype of `ref`."""
    narrow = codes.astype(ref.dtype)
    # JAX's interpreter of TPUs does not know references that are viewed as words.
    by_words = not isinstance(interpret, pltpu.InterpretParams)
    if by_words and ref.dtype == jnp.int8 and codes.shape[0] % TILE == 0:
        # Bytes of four tiles fill a register of words and one store; else each tile has its own.
        # JAX loses the axes of `vmap` from a view that is not of a slice.
        ref.at[:].bitcast(jnp.int32)[...] = pltpu.bitcast(narrow, jnp.int32)
    else:
        ref[...] = narrow


def _quantize_kernel(
    seeds_ref: Any,
    scalars_ref: Any,
    x_ref: Any,
    *refs: Any,
    added: int,
    levels: int,
    bits: int,
    size: int,
    view: _View,
    interpret: Any,
) -> None:
    added_refs, (out_ref, *rest_refs) = refs[:added], refs[added:]
    rows, columns = view.block
    first = (pl.program_id(0) * rows * view.columns + pl.program_id(1) * columns).astype(jnp.uint32)
    stride = _hash.stride(seeds_ref[0, 0])
    word = jnp.zeros(view.block, jnp.uint32)
    for plane in range(view.planes):
        start = first + jnp.uint32(plane * view.width)
        mix = _hash.mix if reference.digits(levels) > 16 else _hash.mix_upper
        noise = mix(_progression(view, stride, start * stride + seeds_ref[0, 1]))
        wide = x_ref[plane].astype(jnp.float32)
        for added_ref in added_refs:
            wide = wide + added_ref[plane].astype(jnp.float32)
        codes = reference.round_fixed(wide, scalars_ref[0, 0], scalars_ref[0, 1], noise, levels)
        for rest_ref in rest_refs:
            rest = wide - codes.astype(jnp.float32) * scalars_ref[0, 2]
            rest_ref[plane] = rest.astype(rest_ref.dtype)
        if bits in reference.DTYPES:
            _store(out_ref, codes, interpret)
        else:
            field = (codes + levels).astype(jnp.uint32)
            if view.planes * view.width > size:
                position = _progression(view, jnp.uint32(1), start)
                field = jnp.where(position < jnp.uint32(size), field, jnp.uint32(0))
            word = word | (field << jnp.uint32(plane * bits))
    if bits not in reference.DTYPES:
        out_ref[...] = word


def quantize(
    x: jax.Array,
    scale: jax.Array,
    seeds: jax.Array,
    added: jax.Array | None = None,
    *,
    levels: int,
    bits: int,
    residual: bool,
    divisor: float = 1.0,
    config: Config | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """See `reference.quantize`."""
    if not x.size:
        options: dict[str, Any] = {"levels": levels, "bits": bits, "residual": residual}
        return reference.quantize(x, scale, seeds, added, **options)
    view = _view(x.shape, bits, config or Config.of(x.dtype))
    step = reference.residual_step(scale, levels, divisor)
    scalars = jnp.stack([*reference.factors(scale, levels), step])
    arrays = [a for a in (x, added) if a is not None]
    each = (reference.to_planes(a, view.planes, view.width, view.pitch) for a in arrays)
    planes, *more, scalars, seeds = _vma.equally_varying(
        *(a.reshape(view.shape) for a in each), scalars, seeds
    )
    dtype = reference.DTYPES.get(bits, jnp.uint32)
    out_specs = [view.word_spec]
    out_shape = [_vma.like(planes, (view.rows, view.columns), dtype)]
    if residual:
        out_specs.append(view.spec)
        out_shape.append(_vma.like(planes, view.shape, arrays[-1].dtype))
    fields, *rest = pl.pallas_call(
        functools.partial(
            _quantize_kernel,
            added=len(more),
            levels=levels,
            bits=bits,
            size=x.size,
            view=view,
            interpret=interpret,
        ),
        grid=view.grid,
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pltpu.SMEM),
            *[view.spec] * len(arrays),
        ],
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
    )(seeds.reshape(1, 2), scalars.reshape(1, 3), planes, *more)
    shape = x.shape if bits in reference.DTYPES else (view.width,)
    return (
        reference.from_planes(fields, view.width, view.pitch, shape),
        *(reference.from_planes(planes, view.width, view.pitch, x.shape) for planes in rest),
    )


def _dequantize_kernel(
    step_ref: Any, words_ref: Any, *refs: Any, levels: int, bits: int, count: int
) -> None:
    *added_refs, out_ref = refs
    for plane in range(out_ref.shape[0]):
        sums = reference.field_sums(words_ref[...], plane, levels, bits, count)
        mean = sums.astype(jnp.float32) * step_ref[0, 0]
        for added_ref in added_refs:
            mean = added_ref[plane] + mean
        out_ref[plane] = mean


def dequantize(
    codes: jax.Array,
    scale: jax.Array,
    accumulate: jax.Array | None = None,
    *,
    levels: int,
    bits: int,
    count: int,
    shape: tuple[int, ...],
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See `reference.dequantize`."""
    if not math.prod(shape):
        return reference.dequantize(
            codes, scale, accumulate, levels=levels, bits=bits, count=count, shape=shape
        )
    view = _view(shape, bits, config or Config.of(codes.dtype))
    step = reference.level_step(scale, levels * count).reshape(1, 1)
    words = reference.to_planes(codes, 1, view.width, view.pitch).reshape(view.rows, view.columns)
    added = [] if accumulate is None else [accumulate]
    added = [reference.to_planes(a, view.planes, view.width, view.pitch) for a in added]
    step, words, *added = _vma.equally_varying(step, words, *(a.reshape(view.shape) for a in added))
    planes = pl.pallas_call(
        functools.partial(_dequantize_kernel, levels=levels, bits=bits, count=count),
        grid=view.grid,
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            view.word_spec,
            *(view.spec for _ in added),
        ],
        out_specs=view.spec,
        out_shape=_vma.like(words, view.shape, jnp.float32),
        # A sum over arrays is kept in one place, and XLA copies it only if it is needed afterwards.
        # JAX's interpreter returns such an array of a wrong size if the last block is not full.
        input_output_aliases={2: 0} if added and view.rows % view.block[0] == 0 else {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
    )(step, words, *added)
    return reference.from_planes(planes, view.width, view.pitch, shape)
