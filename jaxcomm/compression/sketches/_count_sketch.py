"""A count-sketch of all coordinates."""

import math
from typing import Annotated, Literal, NamedTuple

import jax

from jaxcomm import _noise
from jaxcomm._contract import Claims, Codec, Context, Memory
from jaxcomm._require import AboveZero, Range, checked
from jaxcomm.compression.sketches._cells import MOST_ROWS
from pallas_kernels import count_sketch as ops

Hashing = Literal["tiles", "elements"]


MOST_ROUNDING = 1.1
"""The largest ratio of the size of a table to the requested size."""


class CountSketchPayload(NamedTuple):
    """The payload of one unit (a bucket or a leaf), or a sum of such payloads over workers."""

    table: jax.Array  # float32[rows, columns]


@checked
def count_sketch(
    *,
    sketch_ratio: AboveZero,
    rows: Annotated[int, Range(least=1, most=MOST_ROWS)] = 1,
    decode: Literal["mean", "median"] = "mean",
    hashing: Hashing | None = None,
) -> Codec:
    r"""Adds each coordinate, with a random sign, to one random column of each row of a table.

    .. math:: S_{rj} = \sum_{t : h_r(t) = j} \sigma_r(t) x_t, \qquad
              \hat x_t = \operatorname{mean}_r\, \sigma_r(t) S_{r h_r(t)}

    with new hashes in each step, the same on all workers. Tables are added. The error of the mean
    is :math:`\mathbb{E}\|\hat x - x\|^2 \le \frac{d - 1}{c} \|x\|^2` for :math:`c` cells in total.
    This is about the error of :func:`jaxcomm.compression.sparsifiers.random_k` with :math:`c`
    values. A sketch is useful if few coordinates are large, which the median of rows recovers, or
    if its linearity is needed.

    Args:
      sketch_ratio: Cells of the table per coordinate, :math:`c / d`; rounding to whole columns and
        tiles adds at most a tenth.
      rows: The number of rows of the table.
      decode: `"mean"` or `"median"` of the rows' estimates.
      hashing: `"tiles"`, which a kernel computes on GPU and TPU, with the columns rounded up to a
        multiple of at least 1024; or `"elements"`. See :func:`pallas_kernels.count_sketch.encode`.
        Default: tiles if they add at most a tenth to the columns, which holds from 10240 columns
        on.

    Returns:
      A codec. Its payload is a float32 table. `combine` is `"sum"`. With the mean it is unbiased
      and states its `variance`. For the median no bound is known.

    Raises:
      ValueError: If an option is out of range. When encoding, if `hashing="tiles"` makes the table
        more than a tenth larger than `sketch_ratio` requests.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.sketches import count_sketch
      >>> codec = count_sketch(sketch_ratio=0.5, rows=3, decode="median", hashing="elements")
      >>> x = jnp.zeros(60).at[7].set(5.0)
      >>> payload, _ = codec.encode(Context.of(x), x)
      >>> payload.table.shape
      (3, 10)
      >>> float(codec.decode(Context.of(x), payload)[7])
      5.0

    References:
      Charikar, Chen, Farach-Colton, `Finding frequent items in data streams
      <https://doi.org/10.1016/S0304-3975(03)00400-6>`_, 2004.
    """

    def table_of(size: int) -> tuple[int, Hashing]:
        """The number of columns, and the hashing."""
        wanted = max(math.ceil(sketch_ratio * size / rows), 1)
        rounded = ops.round_columns(wanted)
        fits = rounded <= MOST_ROUNDING * wanted
        if hashing == "tiles" and not fits:
            raise ValueError(
                f"`hashing`='tiles' rounds the table from {rows} x {wanted} to {rows} x {rounded} "
                "cells: omit `hashing`, or use 'elements'."
            )
        how = hashing or ("tiles" if fits else "elements")
        return (rounded if how == "tiles" else wanted), how

    def encode(context: Context, x: jax.Array) -> tuple[CountSketchPayload, Memory]:
        columns, how = table_of(x.size)
        seeds = _noise.seeds(context.keys.shared)
        table = ops.encode(x, seeds, rows=rows, columns=columns, hashing=how)
        return CountSketchPayload(table), context.memory

    def decode_mean(context: Context, payload: CountSketchPayload) -> jax.Array:
        _, how = table_of(math.prod(context.shape))
        seeds = _noise.seeds(context.keys.shared)
        total = ops.decode(payload.table, seeds, shape=context.shape, estimate=decode, hashing=how)
        return total / context.count

    def variance(size: int, workers: int) -> float:
        return (size - 1) / (rows * table_of(size)[0])

    return Codec(
        encode=encode,
        decode=decode_mean,
        combine="sum",
        claims=Claims(variance=variance if decode == "mean" else None),
    )
