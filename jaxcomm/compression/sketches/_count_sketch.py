"""The count-sketch of all coordinates."""

import math
from typing import Literal, NamedTuple, get_args

import jax

from jaxcomm import _noise
from jaxcomm._base import Codec, Coins, Memory, no_memory, settled
from jaxcomm.compression.sketches._cells import require_positive, require_rows
from pallas_kernels import count_sketch as ops

Estimate = Literal["mean", "median"]
Hashing = Literal["tiles", "elements"]


class CountSketchPayload(NamedTuple):
    """One unit on the wire, or the sum of several workers' units."""

    table: jax.Array  # float32[rows, columns]


def count_sketch(
    *,
    ratio: float,
    rows: int = 1,
    decode: Estimate = "mean",
    hashing: Hashing = "tiles",
) -> Codec:
    r"""Every coordinate, under a random sign, in one random column of each row of a table.

    .. math:: S_{rj} = \sum_{t : h_r(t) = j} \sigma_r(t) x_t, \qquad
              \hat x_t = \operatorname{mean}_r\, \sigma_r(t) S_{r h_r(t)}

    with hashes that all workers draw alike, and anew in each step. Tables are added. The error of
    the mean, :math:`\mathbb{E}\|\hat x - x\|^2 \le \frac{d - 1}{c} \|x\|^2` for :math:`c` cells in
    all, is that of :func:`random_k` with as many values. A sketch is of use where few coordinates
    are large, which the median of rows recovers, or where its linearity is.

    Args:
      ratio: Cells of the table for each coordinate: :math:`c / d`, before columns are rounded up.
      rows: Of the table.
      decode: `"mean"` or `"median"` of the rows' estimates.
      hashing: `"tiles"`, which a kernel does on GPU and TPU, with columns rounded up to a multiple
        of 1024, or more; or `"elements"`. See :func:`pallas_kernels.count_sketch.encode`.

    Returns:
      A codec. Its payload is a float32 table. `combine` is `"sum"`. With the mean it is unbiased
      and states its `variance`; of the median no bound is known.

    Raises:
      ValueError: If an option is out of range.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm import Coins
      >>> from jaxcomm.compression.sketches import count_sketch
      >>> codec = count_sketch(ratio=0.5, rows=3, decode="median", hashing="elements")
      >>> coins = Coins(jax.random.key(0), jax.random.key(1))
      >>> x = jnp.zeros(60).at[7].set(5.0)
      >>> payload, _ = codec.encode(coins, codec.init(x), x, (), 1)
      >>> payload.table.shape
      (3, 10)
      >>> float(codec.decode(coins.public, payload, (), 1, 1, x.shape)[7])
      5.0

    References:
      Charikar, Chen, Farach-Colton, `Finding frequent items in data streams
      <https://doi.org/10.1016/S0304-3975(03)00400-6>`_, 2004.
    """
    require_positive("ratio", ratio)
    require_rows(rows)
    for name, value, known in (("decode", decode, Estimate), ("hashing", hashing, Hashing)):
        if value not in get_args(known):
            raise ValueError(f"`{name}` must be one of {get_args(known)}, got {value!r}.")

    def columns_of(size: int) -> int:
        wanted = max(math.ceil(ratio * size / rows), 1)
        return ops.round_columns(wanted) if hashing == "tiles" else wanted

    def encode(
        coins: Coins, memory: Memory, x: jax.Array, agreed: tuple[()], workers: int
    ) -> tuple[CountSketchPayload, Memory]:
        del agreed, workers
        table = ops.encode(
            x,
            _noise.seeds(coins.public),
            rows=rows,
            columns=columns_of(x.size),
            hashing=hashing,
        )
        return CountSketchPayload(table), memory

    def decode_mean(
        public: jax.Array,
        payload: CountSketchPayload,
        agreed: tuple[()],
        workers: int,
        count: int,
        shape: tuple[int, ...],
    ) -> jax.Array:
        del agreed, workers
        seeds = _noise.seeds(public)
        total = ops.decode(payload.table, seeds, shape=shape, estimate=decode, hashing=hashing)
        return total / count

    def variance(size: int, workers: int) -> float:
        del workers
        return (size - 1) / (rows * columns_of(size))

    return Codec(
        init=no_memory,
        measure=lambda coins, memory, x: (),
        agree=(),
        encode=encode,
        decode=decode_mean,
        settle=settled,
        combine="sum",
        variance=variance if decode == "mean" else None,
    )
