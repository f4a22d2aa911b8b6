"""S2 Reducer's codec: a bitmap of what is not zero, and a count-sketch of the values."""

import math
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from jaxcomm import _noise
from jaxcomm._base import Codec, Coins, Memory, no_memory, settled
from jaxcomm.compression import _support
from jaxcomm.compression._support import Granularity, Parts
from jaxcomm.compression.quantizers._fields import choose_field
from jaxcomm.compression.quantizers._norms import NORMS
from jaxcomm.compression.sketches._peeling import peel
from pallas_kernels.count_sketch import ESTIMATES, locations
from pallas_kernels.quantize import dequantize, quantize

Decode = Literal["mean", "median", "peel"]

PEELS = 1.2
"""Cells a coordinate, of three rows: with fewer, half of the coordinates or more do not peel."""

MOST_ROWS = 32


class S2Statistics(NamedTuple):
    """What workers agree on before encoding."""

    support: Any  # uint32[ceil(parts / 32)], the bitmap
    norm: Any  # of codes of 8 bits, their norm; else ()


class S2Payload(NamedTuple):
    """One unit on the wire, or the sum of several workers' units."""

    table: jax.Array  # float32[rows, columns], or int8 of codes


def _require_options(
    density: float, ratio: float, rows: int, granularity: Granularity, decode: str, bits: int
) -> None:
    for name, number, most in (("density", density, 1.0), ("ratio", ratio, math.inf)):
        if not isinstance(number, int | float) or not 0 < number <= most or number == math.inf:
            raise ValueError(
                f"`{name}` must be a Python float in (0, {most:g}{']' if most == 1 else ')'}, got "
                f"{number!r}: it decides shapes on the wire. Under `optax.inject_hyperparams` pass "
                f"`static_args=('{name}',)`."
            )
    if not isinstance(rows, int) or isinstance(rows, bool) or not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"`rows` must be a Python int in [1, {MOST_ROWS}], got {rows!r}.")
    _support.require_granularity(granularity)
    if decode not in get_args(Decode):
        raise ValueError(f"`decode` must be one of {get_args(Decode)}, got {decode!r}.")
    if decode == "peel" and rows < 2:
        raise ValueError(
            f"`decode`='peel' needs `rows` of 2 or more, and 3 are best, got {rows}: what collides "
            "in its only row is never alone."
        )
    if bits not in (8, 32):
        raise ValueError(f"`bits` must be 8 or 32, got {bits!r}.")
    if bits == 8 and decode != "peel":
        raise ValueError(
            f"`bits`=8 needs `decode`='peel', got {decode!r}: a cell of the table is known modulo "
            "256, which is enough for a coordinate that is alone, and not for an estimate."
        )


def s2_sketch(
    *,
    density: float,
    ratio: float,
    rows: int = 1,
    granularity: Granularity = "row",
    decode: Decode = "mean",
    bits: int = 32,
) -> Codec:
    r"""The coordinates of the union of all workers' supports, in a count-sketch.

    .. math:: U = \bigcup_i \operatorname{supp}(x_i), \qquad
              S_{rj} = \sum_{t \in U : h_r(t) = j} \sigma_r(t) x_t, \qquad
              \hat x_t = \begin{cases} \operatorname{mean}_r \sigma_r(t) S_{r h_r(t)} & t \in U \\
              0 & \text{otherwise} \end{cases}

    with hashes that all workers draw alike, and anew in each step. Workers agree on a bitmap of
    :math:`U` before they encode, and tables are added. See :func:`jaxcomm.s2_reducer`.

    Args:
      density: Of :math:`U`, as far as it is foreseen: :math:`|U| / d`, in (0, 1].
      ratio: Cells of the table for each of the coordinates that are foreseen; the table has
        `ceil(ratio * density * d / rows)` columns in each row.
      rows: Of the table.
      granularity: What has one bit in the bitmap: a `"row"` (all but the first axis), an
        `"element"`, or a block of so many coordinates. :math:`U` is a union of these.
      decode: `"mean"` or `"median"` of the rows' estimates, or `"peel"`, which solves for the
        values.
      bits: 32, or 8: int8 codes of a common norm enter the sketch, which needs `"peel"`.

    Returns:
      A codec with the statistics `"or"` (and `"max"` for 8 bits). `combine` is `"sum"`. With
      `"mean"`, or `"peel"` of 32 bits, it is unbiased and states its `variance` at the density
      foreseen, :math:`(K - 1)/c` for :math:`K` coordinates and :math:`c` cells in all. Of the
      median no bound is known. Of 8 bits, coordinates that do not peel are 0.

    Raises:
      ValueError: If an option is out of range; when encoding, if `granularity` is `"row"` and the
        unit has one axis.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm import Coins
      >>> from jaxcomm.compression.sketches import s2_sketch
      >>> codec = s2_sketch(density=0.5, ratio=2, rows=3, decode="peel")
      >>> coins = Coins(jax.random.key(0), jax.random.key(1))
      >>> x = jnp.zeros((8, 4)).at[3].set(jnp.arange(4.0)).at[6].set(5.0)
      >>> agreed = codec.measure(coins, codec.init(x), x)
      >>> agreed.support
      Array([72], dtype=uint32)
      >>> payload, _ = codec.encode(coins, codec.init(x), x, agreed, 1)
      >>> payload.table.shape
      (3, 11)
      >>> bool(jnp.allclose(codec.decode(coins.public, payload, agreed, 1, 1, x.shape), x))
      True

    References:
      Ge et al., `S2 Reducer: High-Performance Sparse Communication to Accelerate Distributed Deep
      Learning <https://arxiv.org/abs/2110.02140>`_, 2021.
    """
    _require_options(density, ratio, rows, granularity, decode, bits)

    def columns_of(size: int) -> int:
        return max(math.ceil(ratio * density * size / rows), 1)

    def room_of(parts: Parts) -> int:
        """Parts that are worked on at once: those foreseen, or as many as may peel."""
        room = density * parts.count
        if decode == "peel":
            room = max(room, rows * columns_of(parts.size) / PEELS / parts.width)
        return min(math.ceil(room), parts.count)

    def measure(coins: Coins, memory: Memory, x: jax.Array) -> S2Statistics:
        del coins, memory
        support = _support.bitmap(x, _support.parts_of(x.shape, granularity))
        return S2Statistics(support, NORMS["max"].measure(x) if bits == 8 else ())

    def cells_of(
        public: jax.Array, chosen: jax.Array, parts: Parts
    ) -> tuple[jax.Array, jax.Array]:
        """Where the coordinates of some parts are in the flat table, and their signs."""
        columns = columns_of(parts.size)
        index = _support.coordinates(chosen, parts).ravel()
        column, signs = locations(index, _noise.seeds(public), rows=rows, columns=columns)
        return column + jnp.arange(rows, dtype=jnp.int32)[:, None] * columns, signs

    def add(
        public: jax.Array, values: jax.Array, chosen: jax.Array, parts: Parts, table: jax.Array
    ) -> jax.Array:
        """The flat table with the values of some parts added."""
        for cell, sign in zip(*cells_of(public, chosen, parts), strict=True):
            signed = jnp.where(sign < 0, -values, values)
            table = table.at[cell].add(signed, mode="promise_in_bounds")
        return table

    def encode(
        coins: Coins, memory: Memory, x: jax.Array, agreed: S2Statistics, workers: int
    ) -> tuple[S2Payload, Memory]:
        parts, columns = _support.parts_of(x.shape, granularity), columns_of(x.size)
        room, empty = room_of(parts), jnp.zeros(rows * columns_of(x.size))

        def add_floats(chosen: jax.Array, table: jax.Array) -> jax.Array:
            values = _support.take(x, chosen, parts).ravel()
            return add(coins.public, values, chosen, parts, table)

        if bits == 32:
            table = _support.over_members(agreed.support, room, parts, add_floats, empty)
            return S2Payload(table.reshape(rows, columns)), memory
        # What does not fit would not peel either.
        chosen = _support.members(agreed.support, 0, room, parts)
        field = choose_field(None, bits, workers)
        codes = quantize(
            _support.take(x, chosen, parts).ravel(),
            NORMS["max"].value(agreed.norm),
            _noise.seeds(coins.private),
            levels=field.levels,
            bits=32,
        )
        table = add(coins.public, codes, chosen, parts, empty.astype(jnp.int32))
        # Modulo 256: a coordinate that is alone in a cell needs no more.
        return S2Payload(table.astype(jnp.int8).reshape(rows, columns)), memory

    def estimate(public: jax.Array, table: jax.Array, chosen: jax.Array, parts: Parts) -> jax.Array:
        """Of the coordinates of some parts, from the flat table."""
        values = [
            jnp.where(sign < 0, -table[cell], table[cell])
            for cell, sign in zip(*cells_of(public, chosen, parts), strict=True)
        ]
        return ESTIMATES["mean" if decode == "peel" else decode](values)

    def estimate_all(
        public: jax.Array, table: jax.Array, support: jax.Array, parts: Parts
    ) -> jax.Array:
        """Of all coordinates of the union, float32[count, width]."""

        def fill(chosen: jax.Array, result: jax.Array) -> jax.Array:
            values = estimate(public, table, chosen, parts).reshape(-1, parts.width)
            return _support.put(values, chosen, parts, result)

        return _support.over_members(
            support, room_of(parts), parts, fill, jnp.zeros((parts.count, parts.width))
        )

    def solve(public: jax.Array, table: jax.Array, chosen: jax.Array, parts: Parts) -> Peeled:
        """What peels of some parts."""
        cells, signs = cells_of(public, chosen, parts)
        real = jnp.repeat(chosen < parts.count, parts.width)
        wrap = (lambda value: value.astype(jnp.int8).astype(jnp.int32)) if bits == 8 else _same
        return peel(table, cells, signs.astype(table.dtype), real, wrap)

    def decode_floats(
        public: jax.Array, table: jax.Array, support: jax.Array, parts: Parts
    ) -> jax.Array:
        room = room_of(parts)

        def peeled() -> jax.Array:
            chosen = _support.members(support, 0, room, parts)
            found = solve(public, table, chosen, parts)
            values = jnp.where(found.solved, found.values, estimate(public, found.rest, chosen, parts))
            zeros = jnp.zeros((parts.count, parts.width))
            return _support.put(values.reshape(-1, parts.width), chosen, parts, zeros)

        estimated = functools.partial(estimate_all, public, table, support, parts)
        if decode != "peel":
            return estimated()
        return lax.cond(_support.count(support) <= room, peeled, estimated)

    def decode_codes(
        public: jax.Array, table: jax.Array, support: jax.Array, parts: Parts
    ) -> jax.Array:
        chosen = _support.members(support, 0, room_of(parts), parts)
        sums = solve(public, table.astype(jnp.int32), chosen, parts).values
        zeros = jnp.zeros((parts.count, parts.width), jnp.int32)
        return _support.put(sums.reshape(-1, parts.width), chosen, parts, zeros)

    def decode_mean(
        public: jax.Array,
        payload: S2Payload,
        agreed: S2Statistics,
        workers: int,
        count: int,
        shape: tuple[int, ...],
    ) -> jax.Array:
        parts = _support.parts_of(shape, granularity)
        table = payload.table.ravel()
        if bits == 32:
            mean = decode_floats(public, table, agreed.support, parts) / count
        else:
            mean = dequantize(
                decode_codes(public, table, agreed.support, parts),
                NORMS["max"].value(agreed.norm),
                levels=choose_field(None, bits, workers).levels,
                bits=32,
                shape=(parts.count, parts.width),
                count=count,
            )
        return mean.ravel()[: parts.size].reshape(shape)
