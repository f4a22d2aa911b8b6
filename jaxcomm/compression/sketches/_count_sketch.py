"""The count-sketch of all coordinates."""

import math
from typing import Literal, NamedTuple, get_args

import jax

from jaxcomm import _noise
from jaxcomm._base import Claims, Codec, Context, Memory
from jaxcomm.compression.sketches._cells import require_positive, require_rows
from pallas_kernels import count_sketch as ops

Estimate = Literal["mean", "median"]
Hashing = Literal["tiles", "elements"]


MOST_ROUNDING = 1.1
"""Cells of a table for each that was asked for, at most."""


class CountSketchPayload(NamedTuple):
    """One unit on the wire, or the sum of several workers' units."""

    table: jax.Array  # float32[rows, columns]


def count_sketch(
    *,
    ratio: float,
    rows: int = 1,
    decode: Estimate = "mean",
    hashing: Hashing | None = None,
) -> Codec:
    r"""Every coordinate, under a random sign, in one random column of each row of a table.

    .. math:: S_{rj} = \sum_{t : h_r(t) = j} \sigma_r(t) x_t, \qquad
              \hat x_t = \operatorname{mean}_r\, \sigma_r(t) S_{r h_r(t)}

    with hashes that all workers draw alike, and anew in each step. Tables are added. The error of
    the mean, :math:`\mathbb{E}\|\hat x - x\|^2 \le \frac{d - 1}{c} \|x\|^2` for :math:`c` cells in
    all, is that of :func:`random_k` with as many values. A sketch is of use where few coordinates
    are large, which the median of rows recovers, or where its linearity is.

    Args:
      ratio: Cells of the table for each coordinate: :math:`c / d`, to a tenth, and whole columns.
      rows: Of the table.
      decode: `"mean"` or `"median"` of the rows' estimates.
      hashing: `"tiles"`, which a kernel does on GPU and TPU, with columns rounded up to a multiple
        of 1024, or more; or `"elements"`. See :func:`pallas_kernels.count_sketch.encode`. Default:
        tiles where they make at most a tenth more columns, which from 10240 on they do.

    Returns:
      A codec. Its payload is a float32 table. `combine` is `"sum"`. With the mean it is unbiased
      and states its `variance`; of the median no bound is known.

    Raises:
      ValueError: If an option is out of range; when encoding, if `hashing="tiles"` makes a table
        more than a tenth larger than was asked for.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.sketches import count_sketch
      >>> codec = count_sketch(ratio=0.5, rows=3, decode="median", hashing="elements")
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
    require_positive("ratio", ratio)
    require_rows(rows)
    chosen = "tiles" if hashing is None else hashing
    for name, value, known in (("decode", decode, Estimate), ("hashing", chosen, Hashing)):
        if value not in get_args(known):
            raise ValueError(f"`{name}` must be one of {get_args(known)}, got {value!r}.")

    def table_of(size: int) -> tuple[int, Hashing]:
        """How many columns there are, and how coordinates are hashed to them."""
        wanted = max(math.ceil(ratio * size / rows), 1)
        rounded = ops.round_columns(wanted)
        if hashing == "elements" or (hashing is None and rounded > MOST_ROUNDING * wanted):
            return wanted, "elements"
        if rounded > MOST_ROUNDING * wanted:
            raise ValueError(
                f"`hashing`='tiles' rounds the table of {size} coordinates from {rows} x {wanted} "
                f"cells, for which {ratio=} asks, to {rows} x {rounded}. Leave `hashing` out, or "
                "use 'elements'."
            )
        return rounded, "tiles"

    def encode(context: Context, x: jax.Array) -> tuple[CountSketchPayload, Memory]:
        columns, how = table_of(x.size)
        seeds = _noise.seeds(context.coins.public)
        table = ops.encode(x, seeds, rows=rows, columns=columns, hashing=how)
        return CountSketchPayload(table), context.memory

    def decode_mean(context: Context, payload: CountSketchPayload) -> jax.Array:
        _, how = table_of(math.prod(context.shape))
        seeds = _noise.seeds(context.coins.public)
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
