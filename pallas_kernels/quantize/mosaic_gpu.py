"""`quantize` and `dequantize` as Mosaic kernels for GPU: one pass over memory.

A block of 128 threads processes `block` consecutive words (elements, if unpacked) of every plane,
and the last block also the rest of the plane. No two blocks write the same number. The last one may
write a number twice, so no result may be stored in the place of an operand.

Two costs remain for sizes that do not fit. If the width of a plane is no multiple of `vector`, by
default 4, each thread reads and writes one number at a time. If the size is no multiple of the
fields in a word, the array is padded and a float result is cut, each in a separate pass.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _gpu, _hash, _vma
from pallas_kernels._configs import THREADS, PerThread, require_field
from pallas_kernels._gpu import by_pieces, require_int32
from pallas_kernels.quantize import reference


@dataclasses.dataclass(frozen=True)
class Config(PerThread):
    """A thread has at most `numbers` words of a plane."""

    vector: int = 4  # Adjacent words of a thread, if their number divides a plane: 1, 2, 4 or 8.

    def __post_init__(self) -> None:
        super().__post_init__()
        require_field("vector", self.vector, (1, 2, 4, 8), "1, 2, 4 or 8")
        if self.vector > self.numbers:
            raise ValueError(
                f"`vector` must be at most `numbers`={self.numbers}, got {self.vector}."
            )

    @classmethod
    def candidates(cls, dtype: jax.typing.DTypeLike) -> tuple["Config", ...]:
        """Eight adjacent numbers are one read of bfloat16 and one write of 8-bit codes."""
        return *super().candidates(dtype), cls(8, vector=8), cls(16, vector=8)

    def tiling(self, width: int) -> tuple[int, int, int]:
        """The pitch of planes of this width, the length of a block, and the vector width."""
        whole = width % self.vector == 0 and width >= self.vector * THREADS
        vector = self.vector if whole else 1
        pitch = max(width, THREADS)
        unit = vector * THREADS
        return pitch, unit * min(self.numbers // vector, pitch // unit), vector


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
    require_int32(x.size)
    if not x.size:
        options: dict[str, Any] = {"levels": levels, "bits": bits, "residual": residual}
        return reference.quantize(x, scale, seeds, added, **options)
    count, width = reference.layout(x.size, bits)
    pitch, block, vector = (config or Config.of(x.dtype)).tiling(width)
    dtype = reference.DTYPES.get(bits, jnp.uint32)
    step = reference.residual_step(scale, levels, divisor)
    scalars = jnp.stack([*reference.factors(scale, levels), step])
    arrays = [a for a in (x, added) if a is not None]
    planes, *more, scalars, seeds = _vma.equally_varying(
        *(reference.to_planes(a, count, width, pitch) for a in arrays), scalars, seeds
    )

    def quantize_piece(
        first: jax.Array | int,
        length: int,
        seeds_ref: Any,
        scalars_ref: Any,
        x_ref: Any,
        *refs: Any,
    ) -> None:
        added_refs, (out_ref, *rest_refs) = refs[: len(more)], refs[len(more) :]
        inside = jnp.asarray(first, jnp.uint32) + lax.iota(jnp.uint32, length)

        def quantize_plane(plane: jax.Array, word: jax.Array) -> jax.Array:
            position = inside + (plane * width).astype(jnp.uint32)
            noise = _hash.bits(position, seeds_ref[0], seeds_ref[1])
            here = pl.ds(first + plane * pitch, length)
            wide = _gpu.side_by_side(x_ref[here], vector, interpret).astype(jnp.float32)
            for added_ref in added_refs:
                term = _gpu.side_by_side(added_ref[here], vector, interpret)
                wide = wide + term.astype(jnp.float32)
            codes = reference.round_fixed(wide, scalars_ref[0], scalars_ref[1], noise, levels)
            for rest_ref in rest_refs:
                rest = wide - codes.astype(jnp.float32) * scalars_ref[2]
                rest_ref[here] = rest.astype(rest_ref.dtype)
            if bits in reference.DTYPES:
                out_ref[here] = codes.astype(dtype)
                return word
            field = (codes + levels).astype(jnp.uint32)
            if count * width > x.size:
                field = jnp.where(position < jnp.uint32(x.size), field, jnp.uint32(0))
            return word | (field << (plane * bits).astype(jnp.uint32))

        word = _gpu.side_by_side(jnp.zeros(length, jnp.uint32), vector, interpret)
        word = lax.fori_loop(0, count, quantize_plane, word)
        if bits not in reference.DTYPES:
            out_ref[pl.ds(first, length)] = word

    out_type = [_vma.like(planes, (pitch,), dtype)]
    if residual:
        out_type.append(_vma.like(planes, planes.shape, arrays[-1].dtype))
    fields, *rest = _gpu.gpu_kernel(
        by_pieces(pitch, block, vector * THREADS, quantize_piece),
        out_type=tuple(out_type),
        grid={"block": pitch // block},
        interpret=interpret,
    )(seeds, scalars, planes, *more)
    shape = x.shape if bits in reference.DTYPES else (width,)
    return (
        reference.from_planes(fields, width, pitch, shape),
        *(reference.from_planes(planes, width, pitch, x.shape) for planes in rest),
    )


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
    size = math.prod(shape)
    require_int32(size)
    if not size:
        return reference.dequantize(
            codes, scale, accumulate, levels=levels, bits=bits, count=count, shape=shape
        )
    fields, width = reference.layout(size, bits)
    pitch, block, vector = (config or Config.of(codes.dtype)).tiling(width)
    step = reference.level_step(scale, levels * count).reshape(1)
    words = reference.to_planes(codes, 1, width, pitch)
    added = [] if accumulate is None else [accumulate]
    added = [reference.to_planes(a, fields, width, pitch) for a in added]
    step, words, *added = _vma.equally_varying(step, words, *added)

    def dequantize_piece(
        first: jax.Array | int, length: int, step_ref: Any, words_ref: Any, *refs: Any
    ) -> None:
        *added_refs, out_ref = refs
        word = _gpu.side_by_side(words_ref[pl.ds(first, length)], vector, interpret)
        for plane in range(fields):
            sums = reference.field_sums(word, plane, levels, bits, count)
            mean = sums.astype(jnp.float32) * step_ref[0]
            here = pl.ds(first + plane * pitch, length)
            for added_ref in added_refs:
                mean = added_ref[here] + mean
            out_ref[here] = mean

    planes = _gpu.gpu_kernel(
        by_pieces(pitch, block, vector * THREADS, dequantize_piece),
        out_type=_vma.like(words, (fields * pitch,), jnp.float32),
        grid={"block": pitch // block},
        interpret=interpret,
    )(step, words, *added)
    return reference.from_planes(planes, width, pitch, shape)
