"""S2 Reducer with codes of 8 bits in the sketch, which is solved modulo 256."""

import jax
import jax.numpy as jnp

from jaxcomm import _axis, _noise
from jaxcomm._base import Claims, Codec, Context, Diagnostics, Memory
from jaxcomm.compression import _support
from jaxcomm.compression._overflow import Policy, choose_form, nan_unless
from jaxcomm.compression._support import Granularity
from jaxcomm.compression.quantizers._fields import choose_field
from jaxcomm.compression.quantizers._norms import NORMS
from jaxcomm.compression.sketches._cells import (
    S2Payload,
    S2Statistics,
    add,
    cells_of,
    make_sketch,
)
from jaxcomm.compression.sketches._peeling import peel, unpeeled
from pallas_kernels.quantize import dequantize, quantize

BITS = 8
NORM = NORMS["max"]


def _to_int8(sums: jax.Array) -> jax.Array:
    """The number in [-128, 128) that is meant by one that is known modulo 256."""
    return sums.astype(jnp.int8).astype(jnp.int32)


def s2_codes(
    *,
    density: float,
    ratio: float,
    rows: int = 3,
    granularity: Granularity = "row",
    overflow: Policy = "nan",
) -> Codec:
    r"""The codes of :func:`dither` of the union of all workers' supports, in a table of int8.

    .. math:: S_{rj} = \sum_{t \in U : h_r(t) = j} \sigma_r(t)
              \Big\lfloor \frac{s x_t}{\|x\|} + u_t \Big\rfloor \bmod 256

    with the largest magnitude on any worker as the norm. A cell is known modulo 256, which is
    enough: it is solved for only where one coordinate is alone in it, and the sum of a coordinate's
    codes over :math:`n` workers fits, since :math:`n s \le 127`. So a coordinate of the union costs
    `ratio` bytes, and whatever peels has the error of the quantizer alone. What does not is lost:
    the update is NaN then, but under feedback, or where it is to be dropped. At a `ratio` of 1.25
    or more two of :math:`K` coordinates share all their cells of three rows in a part of all steps
    of about :math:`13 / (\text{ratio}^3 K)`.

    Args:
      density: :math:`|U| / d` as it is foreseen, in (0, 1].
      ratio: Cells of the table for each coordinate that is foreseen; 1.25 or more for all of them
        to peel.
      rows: Of the table, 2 or more; 3 are best.
      granularity: What has one bit in the bitmap: a `"row"` (all but the first axis), an
        `"element"`, or a block of so many coordinates.
      overflow: Without feedback, where something does not peel: `"nan"`, or `"drop"` to lose it.

    Returns:
      A codec. Its payload is an int8 table; its statistics are the bitmap and the norm, which
      workers combine by `"or"` and `"max"`. `combine` is `"sum"`. What does not peel, or fit, is
      drawn anew in each step, so that feedback returns it (`bounded`); with `diagnostics=True`,
      `unpeeled`, and `overflow` likewise, is its part of the union.

    Raises:
      ValueError: If an option is out of range; when encoding, if `granularity` is `"row"` and the
        unit has one axis, or if there are more than 127 workers.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.sketches import s2_codes
      >>> codec = s2_codes(density=0.5, ratio=2)
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

    Differs from the papers: neither sketches codes, or peels.
    """
    sketch_of = make_sketch(density, ratio, rows, granularity)
    if rows < 2:
        raise ValueError(
            f"`rows` must be at least 2 for codes of 8 bits, best 3, got {rows}: in a single row, "
            "what collides is never alone."
        )

    def measure(context: Context, x: jax.Array) -> S2Statistics:
        support = _support.bitmap(x, _support.parts_of(x.shape, granularity))
        return S2Statistics(support, NORM.measure(x))

    def encode(context: Context, x: jax.Array) -> tuple[S2Payload, Memory]:
        sketch, public = sketch_of(x.shape), context.coins.public
        if not x.size:
            return S2Payload(_axis.varying_like(jnp.zeros((rows, 0), jnp.int8), x)), context.memory
        # Of more than these, nothing would peel.
        chosen = _support.window(
            context.statistics.support, public, sketch.room_to_peel, sketch.parts
        )
        codes = quantize(
            _support.take(x, chosen, sketch.parts),
            NORM.value(context.statistics.norm),
            _noise.seeds(context.coins.private),
            levels=choose_field(None, BITS, context.workers).levels,
            bits=32,
        )
        zeros = jnp.zeros(sketch.cells, jnp.int32)
        table = add(zeros, cells_of(sketch, public, chosen), codes)
        return S2Payload(table.astype(jnp.int8).reshape(rows, sketch.columns)), context.memory

    def decode(context: Context, payload: S2Payload) -> jax.Array:
        return solve(context, payload)[0]

    def decode_or_nan(context: Context, payload: S2Payload) -> jax.Array:
        mean, all_of_it = solve(context, payload)
        return nan_unless(all_of_it, mean)

    def solve(context: Context, payload: S2Payload) -> tuple[jax.Array, jax.Array]:
        """The mean of what peels, and whether that is all of the union."""
        sketch, public = sketch_of(context.shape), context.coins.public
        if not sketch.parts.size:
            return jnp.zeros(context.shape), jnp.array(True)
        chosen = _support.window(
            context.statistics.support, public, sketch.room_to_peel, sketch.parts
        )
        real = _support.real(chosen, sketch.parts)
        peeled = peel(
            payload.table.ravel().astype(jnp.int32),
            *cells_of(sketch, public, chosen),
            real,
            wrap=_to_int8,
        )
        mean = dequantize(
            peeled.values,
            NORM.value(context.statistics.norm),
            levels=choose_field(None, BITS, context.workers).levels,
            bits=32,
            shape=peeled.values.shape,
            count=context.count,
        )
        zeros = _support.nothing(sketch.parts, jnp.float32)
        has_room = _support.count(context.statistics.support) <= sketch.room_to_peel
        return (
            _support.whole(_support.put(mean, chosen, sketch.parts, zeros), context.shape),
            has_room & jnp.all(peeled.solved == real),
        )

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        sketch = sketch_of(x.shape)
        union = _support.coordinates_in(context.statistics.support, sketch.parts)
        lost = unpeeled(
            sketch, context.coins.public, context.statistics.support, sketch.room_to_peel
        )
        density = (union, jnp.float32(x.size))
        told = {"union_density": density, "unpeeled": (lost, union), "overflow": (lost, union)}
        return Diagnostics(x, ratios=told)

    drop_overflow = Codec(
        encode=encode,
        decode=decode,
        measure=measure,
        reduce_statistics=S2Statistics("or", NORM.reduce_statistics),
        combine="sum",
        diagnose=diagnose,
        claims=Claims(bounded=True),
    )
    strict = drop_overflow._replace(decode=decode_or_nan)
    return choose_form(overflow, drop_overflow=drop_overflow, strict=strict)
