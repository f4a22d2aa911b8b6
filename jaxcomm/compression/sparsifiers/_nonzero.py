"""Sends the rows, blocks or coordinates that are nonzero, on one worker or on any."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm._contract import Claims, Codec, Context, Diagnostics, Memory
from jaxcomm._require import Share, checked
from jaxcomm.compression import _bits, _support
from jaxcomm.compression._bits import ValuesPayload
from jaxcomm.compression._means import headroom, over_peak
from jaxcomm.compression._overflow import (
    Overflow,
    Policy,
    choose_form,
    decoded_to_nan,
    diagnose_overflow,
    sent_as_nan,
)
from jaxcomm.compression._support import Granularity, Parts
from jaxcomm.compression.sparsifiers._sparse import (
    IndexCode,
    SparsePayload,
    choose_layout,
    pack_indices,
    require_value_dtype,
    select,
    unpack_indices,
)


@checked
def nonzero(
    *,
    density: Share,
    granularity: Granularity = "row",
    value_dtype: Any = jnp.float32,
    overflow: Policy = "nan",
) -> Codec:
    r"""Sends the nonzero rows, elements or blocks exactly, up to a capacity: a sparse all-gather.

    .. math:: C(x)_t = \begin{cases} x_t & t \in \operatorname{supp}(x) \\
              0 & \text{otherwise} \end{cases}

    A part is a row, an element or a block. The capacity is fixed at trace time. If more parts are
    nonzero, feedback sends those of the largest norm and keeps the others for later. Without
    feedback the update is NaN on all workers, unless `overflow="drop"`. `diagnostics=True` reports
    the number of parts beyond the capacity as `overflow`.

    Always sends the full capacity: 4 bytes for each of its coordinates, and an index of about
    :math:`2 - \log_2` `density` bits for each of its parts.

    Args:
      density: The capacity as a fraction of one worker's parts: the largest density to expect.
      granularity: The parts, sent or omitted as a whole: a `"row"` (all but the first axis), an
        `"element"`, or an int, the number of coordinates of a block.
      value_dtype: float32, or bfloat16; feedback compensates its rounding.
      overflow: Without feedback, if more parts are nonzero than the capacity: `"nan"`, or `"drop"`
        to send the largest and drop the others.

    Returns:
      A codec that reports the `overflow` of a step and states its `contraction`, `density`.
      `combine` is `None`. Its derivative is that of the sent values, for the selection that it
      made.

    Raises:
      ValueError: If an option is out of range. When encoding, if `granularity` is `"row"` and the
        unit has one axis.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.sparsifiers import nonzero
      >>> codec, x = nonzero(density=0.5), jnp.zeros((6, 2)).at[1].set(1.0).at[4].set(3.0)
      >>> payload, memory = codec.encode(Context.of(x, memory=codec.init(x)), x)
      >>> payload.values.shape, int(memory.report.overflow)
      ((6,), 0)
      >>> bool(jnp.all(codec.decode(Context.of(x), payload) == x))
      True

    References:
      Renggli et al., `SparCML: High-Performance Sparse Communication for Machine Learning
      <https://doi.org/10.1145/3295500.3356222>`_, 2019 (the sparse all-gather).
    """
    dtype = require_value_dtype(value_dtype)

    def cut(shape: tuple[int, ...]) -> tuple[Parts, int, IndexCode]:
        parts = _support.parts_of(shape, granularity)
        capacity = math.ceil(density * parts.number)
        # An unused entry has the index `number`, one past the last part.
        return parts, capacity, choose_layout(capacity, parts.number + 1, distinct=False)

    def encode(context: Context, x: jax.Array) -> tuple[SparsePayload, Memory]:
        parts, capacity, layout = cut(x.shape)
        if not capacity:
            return SparsePayload(jnp.zeros(0, jnp.uint32), jnp.zeros(0, dtype)), context.memory
        relative = over_peak(x, jnp.max(jnp.abs(x)))  # Its squares neither overflow nor vanish.
        squares = _support.rows_of(jnp.square(relative), parts)
        wanted = _bits.unpack_bits(_support.bitmap(x, parts), parts.number)
        indices, dropped = select(jnp.sum(squares, axis=1), wanted, capacity)
        values = _support.take(x, indices.astype(jnp.int32), parts)
        payload = SparsePayload(pack_indices(indices, layout), values.astype(dtype))
        return payload, context.memory._replace(report=Overflow(dropped))

    def decode(context: Context, payload: SparsePayload) -> jax.Array:
        parts, _, layout = cut(context.shape)
        chosen = unpack_indices(payload.indices, layout).astype(jnp.int32)
        values = payload.values.astype(jnp.float32) / context.count
        return _support.put(values, chosen, parts, context.shape)

    drop_overflow = Codec(
        encode=encode,
        decode=decode,
        diagnose=diagnose_overflow,
        claims=Claims(contraction=lambda size, workers: density),
    )
    return choose_form(overflow, drop_overflow, sent_as_nan(drop_overflow))


class UnionStatistics(NamedTuple):
    """The statistics that are reduced over workers before encoding."""

    support: Any  # uint32[ceil(parts / 32)], which parts are not zero


@checked
def nonzero_union(
    *, density: Share, granularity: Granularity = "row", overflow: Policy = "nan"
) -> Codec:
    r"""Sends the union of all workers' supports, compacted: summable, and exact if it fits.

    .. math:: U = \bigcup_i \operatorname{supp}(x_i), \qquad
              C(x)_t = \begin{cases} x_t & t \in U \\ 0 & \text{otherwise} \end{cases}

    Workers first reduce a bitmap of :math:`U` with one bit per part: a row, an element or a block.
    All workers then have the same position for each part, and the parts are added like a dense
    array. Sends 4 bytes for each coordinate of the capacity, and one bit per part. If :math:`U` has
    more parts than the capacity, the update is NaN. Under feedback, or with `overflow="drop"`, as
    many consecutive parts as fit are sent instead, starting at a random one.

    Args:
      density: The capacity as a fraction of all parts: the largest density of :math:`U` to expect,
        at most 1.
      granularity: The parts, sent or omitted as a whole: a `"row"` (all but the first axis), an
        `"element"`, or an int, the number of coordinates of a block.
      overflow: Without feedback, if :math:`U` has more parts than the capacity: `"nan"`, or
        `"drop"` to drop the excess.

    Returns:
      A codec that states its `contraction`, `density`. `combine` is `"sum"`. `diagnostics=True`
      reports `union_density`, and `overflow`, the fraction of the union beyond the capacity. Its
      derivative is that of the sent values, for the selection that it made.

    Raises:
      ValueError: If an option is out of range. When encoding, if `granularity` is `"row"` and the
        unit has one axis.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm import all_reduce_mean
      >>> from jaxcomm.compression.sparsifiers import nonzero_union
      >>> tx = all_reduce_mean(nonzero_union(density=0.5), scope="leaf")
      >>> x = jnp.zeros((2, 4, 1)).at[0, 1].set(2.0).at[1, 3].set(4.0)
      >>> average = jax.jit(jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data"))
      >>> print(average(x)[0].T)
      [[0. 1. 0. 2.]]

    References:
      Fei et al., `Efficient Sparse Collective Communication and its application to Accelerate
      Distributed Deep Learning (OmniReduce) <https://doi.org/10.1145/3452296.3472904>`_, 2021.

    Differs from the paper: there, aggregators request the blocks that are nonzero on any worker,
    one after the other. Here the bitmaps are reduced first, and the capacity is fixed at trace
    time, as XLA requires.
    """

    def cut(shape: tuple[int, ...]) -> tuple[Parts, int]:
        parts = _support.parts_of(shape, granularity)
        return parts, math.ceil(density * parts.number)

    def measure(context: Context, x: jax.Array) -> UnionStatistics:
        return UnionStatistics(_support.bitmap(x, _support.parts_of(x.shape, granularity)))

    def encode(context: Context, x: jax.Array) -> tuple[ValuesPayload, Memory]:
        parts, capacity = cut(x.shape)
        chosen = _support.window(context.statistics.support, context.keys.shared, capacity, parts)
        # The scale keeps the sum over workers finite; as a power of two it is exact.
        values = _support.take(x, chosen, parts) * headroom(context.workers)
        return ValuesPayload(values.reshape(capacity, parts.width)), context.memory

    def decode(context: Context, payload: ValuesPayload) -> jax.Array:
        parts, capacity = cut(context.shape)
        chosen = _support.window(context.statistics.support, context.keys.shared, capacity, parts)
        values = payload.values * (1 / (context.count * headroom(context.workers)))
        return _support.put(values, chosen, parts, context.shape)

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        parts, capacity = cut(x.shape)
        union = _support.coordinates_in(context.statistics.support, parts)
        excess = jnp.maximum(union - capacity * parts.width, 0)
        density = (union, jnp.float32(x.size))
        return Diagnostics(x, ratios={"union_density": density, "overflow": (excess, union)})

    def fits(context: Context, payload: ValuesPayload) -> jax.Array:
        return _support.count(context.statistics.support) <= cut(context.shape)[1]

    drop_overflow = Codec(
        encode=encode,
        decode=decode,
        measure=measure,
        reduce_statistics=UnionStatistics("or"),
        combine="sum",
        diagnose=diagnose,
        claims=Claims(contraction=lambda size, workers: density),
    )
    return choose_form(overflow, drop_overflow, decoded_to_nan(drop_overflow, fits))
