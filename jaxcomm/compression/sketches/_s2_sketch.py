"""S2 Reducer: a bitmap of the nonzero parts, and a count-sketch of their values or 8-bit codes."""

from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from jaxcomm import _noise
from jaxcomm._contract import Claims, Codec, Context, Diagnostics, Memory
from jaxcomm._require import AboveZero, Range, Share, checked
from jaxcomm.compression import _support
from jaxcomm.compression._means import headroom
from jaxcomm.compression._overflow import Policy, choose_form, decoded_to_nan, nan_unless
from jaxcomm.compression._support import Granularity
from jaxcomm.compression.quantizers._dither import NORMS, choose_field
from jaxcomm.compression.sketches._cells import (
    MOST_ROWS,
    S2Payload,
    S2Statistics,
    Sketch,
    add,
    cells_of,
    chosen_parts,
    estimate,
    make_sketch,
    peel,
    unpeeled,
)
from pallas_kernels._dispatch import nondifferentiable
from pallas_kernels.quantize import dequantize, quantize

Decode = Literal["mean", "median", "peel"]


def _estimate(
    sketch: Sketch, shared: jax.Array, table: jax.Array, chosen: jax.Array, how: str
) -> jax.Array:
    """Estimates the coordinates of the chosen parts; with `"peel"`, only those that do not peel."""
    cells = cells_of(sketch, shared, chosen)
    if how != "peel":
        return estimate(table, cells, how)
    peeled = peel(table, *cells, _support.real(chosen, sketch.parts))
    return jnp.where(peeled.solved, peeled.values, estimate(peeled.rest, cells, "mean"))


@checked
def s2_sketch(
    *,
    density: Share,
    sketch_ratio: AboveZero,
    rows: Annotated[int, Range(least=1, most=MOST_ROWS)] = 1,
    granularity: Granularity = "row",
    decode: Decode = "mean",
    overflow: Policy = "nan",
) -> Codec:
    r"""Puts the coordinates of the union of all workers' supports into a count-sketch.

    .. math:: U = \bigcup_i \operatorname{supp}(x_i), \qquad
              S_{rj} = \sum_{t \in U : h_r(t) = j} \sigma_r(t) x_t, \qquad
              \hat x_t = \begin{cases} \operatorname{mean}_r \sigma_r(t) S_{r h_r(t)} & t \in U \\
              0 & \text{otherwise} \end{cases}

    with new hashes in each step, the same on all workers. Workers reduce a bitmap of :math:`U`
    before they encode, and tables are added. See :func:`jaxcomm.s2_reducer`.

    If :math:`U` exceeds the capacity, the update is NaN. Under feedback, or with `overflow="drop"`,
    as many consecutive parts of :math:`U` as fit are sent instead, starting at a random one.

    Args:
      density: The capacity for the union, as a fraction :math:`|U| / d` in (0, 1].
      sketch_ratio: Cells of the table per coordinate of capacity: each row has `ceil(sketch_ratio *
        density * d / rows)` columns.
      rows: The number of rows of the table.
      granularity: What one bit of the bitmap represents: a `"row"` (all but the first axis), an
        `"element"`, or an int, the number of coordinates of a block. :math:`U` is a union of these.
      decode: `"mean"` or `"median"` of the rows' estimates; or `"peel"`, which solves for the
        values that peel, and estimates the others.
      overflow: Without feedback, if :math:`U` exceeds the capacity: `"nan"`, or `"drop"` to drop
        the excess.

    Returns:
      A codec. Its payload is a float32 table; its statistic is the bitmap, which is reduced over
      workers by `"or"`. `combine` is `"sum"`. Except for the median, for which no bound is known,
      it is unbiased and states its `variance`, :math:`(K - 1)/c` for :math:`c` cells in total and a
      capacity of :math:`K` coordinates. Under feedback :math:`U` includes the support of the
      residuals, even of rounding errors. Over time it grows to each part that was ever nonzero.

    Raises:
      ValueError: If an option is out of range. When encoding, if `granularity` is `"row"` and the
        unit has one axis.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.sketches import s2_sketch
      >>> codec = s2_sketch(density=0.5, sketch_ratio=2, rows=3, decode="peel")
      >>> x = jnp.zeros((8, 4)).at[3].set(jnp.arange(4.0)).at[6].set(5.0)
      >>> context = Context.of(x)
      >>> context = context.replace(statistics=codec.measure(context, x))
      >>> payload, _ = codec.encode(context, x)
      >>> context.statistics.support.shape, payload.table.shape
      ((1,), (3, 11))
      >>> bool(jnp.allclose(codec.decode(context, payload), x))
      True

    References:
      Ge et al., `S2 Reducer: High-Performance Sparse Communication to Accelerate Distributed Deep
      Learning <https://arxiv.org/abs/2110.02140>`_, 2021.
    """
    sketch_of = make_sketch(density, sketch_ratio, rows, granularity)

    def measure(context: Context, x: jax.Array) -> S2Statistics:
        return S2Statistics(_support.bitmap(x, _support.parts_of(x.shape, granularity)), ())

    def encode(context: Context, x: jax.Array) -> tuple[S2Payload, Memory]:
        sketch, shared = sketch_of(x.shape), context.keys.shared

        chosen = chosen_parts(context, sketch, sketch.capacity)
        # The scale keeps the sum over workers finite; as a power of two it is exact.
        values = _support.take(x, chosen, sketch.parts) * headroom(context.workers)
        table = add(jnp.zeros(sketch.cells, jnp.float32), cells_of(sketch, shared, chosen), values)
        return S2Payload(table.reshape(rows, sketch.columns)), context.memory

    def decode_mean(context: Context, payload: S2Payload) -> jax.Array:
        sketch, shared = sketch_of(context.shape), context.keys.shared
        table = payload.table.ravel() * (1 / (context.count * headroom(context.workers)))
        chosen = chosen_parts(context, sketch, sketch.capacity)
        values = _estimate(sketch, shared, table, chosen, decode)
        return _support.put(values, chosen, sketch.parts, context.shape)

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        sketch = sketch_of(x.shape)
        union = _support.coordinates_in(context.statistics.support, sketch.parts)
        excess = jnp.maximum(union - sketch.capacity * sketch.parts.width, 0)
        ratios = {"union_density": (union, jnp.float32(x.size)), "overflow": (excess, union)}
        if decode == "peel":
            unsolved = unpeeled(context, sketch, sketch.capacity)
            return Diagnostics(x, ratios=ratios | {"unpeeled": (unsolved, union)})
        dropped = excess / jnp.maximum(union, 1)
        error = dropped + (1 - dropped) * jnp.maximum(union - excess - 1, 0) / max(sketch.cells, 1)
        return Diagnostics(x, ratios=ratios, errors={"expected_error": error})

    def fits(context: Context, payload: S2Payload) -> jax.Array:
        return _support.count(context.statistics.support) <= sketch_of(context.shape).capacity

    def variance(size: int, workers: int) -> float:
        return sketch_of((size, 1)).variance

    drop_overflow = Codec(
        encode=encode,
        decode=decode_mean,
        measure=measure,
        reduce_statistics=S2Statistics("or", ()),
        combine="sum",
        diagnose=diagnose,
        claims=Claims(variance=None if decode == "median" else variance),
    )
    return choose_form(overflow, drop_overflow, decoded_to_nan(drop_overflow, fits))


BITS = 8
NORM = NORMS["max"]


def _wrap_to_int8(sums: jax.Array) -> jax.Array:
    """The number in [-128, 128) that equals each sum modulo 256, int32."""
    return sums.astype(jnp.int8).astype(jnp.int32)


@checked
def s2_codes(
    *,
    density: Share,
    sketch_ratio: AboveZero,
    rows: Annotated[int, Range(least=2, most=MOST_ROWS)] = 3,
    granularity: Granularity = "row",
    overflow: Policy = "nan",
) -> Codec:
    r"""Sketches the codes of :func:`dither` on the union of all workers' supports in an int8 table.

    .. math:: S_{rj} = \sum_{t \in U : h_r(t) = j} \sigma_r(t)
              \Big\lfloor \frac{s x_t}{\|x\|} + u_t \Big\rfloor \bmod 256

    with the largest magnitude on any worker as the norm. Cells are sums modulo 256. This is enough:
    a cell is solved only if it contains a single coordinate, and the sum of that coordinate's codes
    over :math:`n` workers fits, since :math:`n s \le 127`. So each coordinate of the union takes
    `sketch_ratio` bytes, and all coordinates that peel have the error of the quantizer only.
    Coordinates that do not peel are lost: the update is then NaN, except under feedback or with
    `overflow="drop"`. For a `sketch_ratio` of at least 1.25, two of :math:`K` coordinates share all
    their cells of three rows in a fraction of about :math:`13 / (\text{sketch\_ratio}^3 K)` of the
    steps.

    Args:
      density: The expected density of the union, :math:`|U| / d`, in (0, 1].
      sketch_ratio: Cells of the table per coordinate of the expected union; at least 1.25 for all
        of them to peel.
      rows: The number of rows of the table, at least 2; 3 is best.
      granularity: What one bit of the bitmap represents: a `"row"` (all but the first axis), an
        `"element"`, or an int, the number of coordinates of a block.
      overflow: Without feedback, if a coordinate does not peel: `"nan"`, or `"drop"` to drop it.

    Returns:
      A codec. Its payload is an int8 table; its statistics are the bitmap and the norm, which are
      reduced over workers by `"or"` and `"max"`. `combine` is `"sum"`. The hashes change in each
      step, and so do the coordinates that do not peel or fit. Feedback therefore sends them in a
      later step (`bounded`). `diagnostics=True` reports their fraction of the union as `unpeeled`
      and as `overflow`.

    Raises:
      ValueError: If an option is out of range. When encoding, if `granularity` is `"row"` and the
        unit has one axis, or if there are more than 127 workers.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.sketches import s2_codes
      >>> codec = s2_codes(density=0.5, sketch_ratio=2)
      >>> x = jnp.zeros((8, 2)).at[3].set(127.0).at[6].set(-5.0)
      >>> context = Context.of(x)
      >>> context = context.replace(statistics=codec.measure(context, x))
      >>> payload, _ = codec.encode(context, x)
      >>> payload.table.dtype, payload.table.shape
      (dtype('int8'), (3, 6))
      >>> bool(jnp.allclose(codec.decode(context, payload), x))
      True

    References:
      Ge et al., `S2 Reducer: High-Performance Sparse Communication to Accelerate Distributed Deep
      Learning <https://arxiv.org/abs/2110.02140>`_, 2021.
      Xin et al., `Global-QSGD <https://arxiv.org/abs/2305.18627>`_, 2023.

    Differs from the papers: neither of them sketches codes or peels.
    """
    sketch_of = make_sketch(density, sketch_ratio, rows, granularity)

    def measure(context: Context, x: jax.Array) -> S2Statistics:
        (x,) = nondifferentiable("s2_sketch", x)
        support = _support.bitmap(x, _support.parts_of(x.shape, granularity))
        return S2Statistics(support, NORM.measure(x))

    def encode(context: Context, x: jax.Array) -> tuple[S2Payload, Memory]:
        sketch, shared = sketch_of(x.shape), context.keys.shared
        # With more parts than these, none would peel.
        chosen = chosen_parts(context, sketch, sketch.peeling_capacity)
        codes = quantize(
            _support.take(x, chosen, sketch.parts),
            NORM.value(context.statistics.norm),
            _noise.seeds(context.keys.private),
            levels=choose_field(None, BITS, context.workers).levels,
            bits=32,
        )
        zeros = jnp.zeros(sketch.cells, jnp.int32)
        table = add(zeros, cells_of(sketch, shared, chosen), codes)
        return S2Payload(table.astype(jnp.int8).reshape(rows, sketch.columns)), context.memory

    def decode(context: Context, payload: S2Payload) -> jax.Array:
        return solve(context, payload)[0]

    def decode_or_nan(context: Context, payload: S2Payload) -> jax.Array:
        mean, complete = solve(context, payload)
        return nan_unless(complete, mean)

    def solve(context: Context, payload: S2Payload) -> tuple[jax.Array, jax.Array]:
        """The mean of the coordinates that peel, and whether the whole union peels."""
        sketch, shared = sketch_of(context.shape), context.keys.shared
        chosen = chosen_parts(context, sketch, sketch.peeling_capacity)
        real = _support.real(chosen, sketch.parts)
        peeled = peel(
            payload.table.ravel().astype(jnp.int32),
            *cells_of(sketch, shared, chosen),
            real,
            wrap=_wrap_to_int8,
        )
        mean = dequantize(
            peeled.values,
            NORM.value(context.statistics.norm),
            levels=choose_field(None, BITS, context.workers).levels,
            bits=32,
            shape=peeled.values.shape,
            count=context.count,
        )
        fits = _support.count(context.statistics.support) <= sketch.peeling_capacity
        dense = _support.put(mean, chosen, sketch.parts, context.shape)
        return dense, fits & jnp.all(peeled.solved == real)

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        sketch = sketch_of(x.shape)
        union = _support.coordinates_in(context.statistics.support, sketch.parts)
        unsolved = unpeeled(context, sketch, sketch.peeling_capacity)
        density, lost = (union, jnp.float32(x.size)), (unsolved, union)
        ratios = {"union_density": density, "unpeeled": lost, "overflow": lost}
        return Diagnostics(x, ratios=ratios)

    drop_overflow = Codec(
        encode=encode,
        decode=decode,
        measure=measure,
        reduce_statistics=S2Statistics("or", NORM.reduce_statistics),
        combine="sum",
        diagnose=diagnose,
        claims=Claims(bounded=True),
    )
    return choose_form(overflow, drop_overflow, drop_overflow.replace(decode=decode_or_nan))
