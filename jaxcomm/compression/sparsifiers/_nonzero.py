"""Sends the nonzero rows, blocks or coordinates of one worker."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm._contract import Claims, Codec, Context, Diagnostics, Memory
from jaxcomm.compression import _bits, _support
from jaxcomm.compression._means import over_peak
from jaxcomm.compression._overflow import (
    Overflow,
    Policy,
    choose_form,
    overflow_totals,
    sent_as_nan,
)
from jaxcomm.compression._support import Granularity, Parts
from jaxcomm.compression.sparsifiers._indices import (
    IndexCode,
    choose_layout,
    pack_indices,
    unpack_indices,
)
from jaxcomm.compression.sparsifiers._sparse import (
    SparsePayload,
    require_value_dtype,
    select,
)


def nonzero(
    *,
    density: float,
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
    _support.require_density(density)
    _support.require_granularity(granularity)
    dtype = require_value_dtype(value_dtype)

    def cut(shape: tuple[int, ...]) -> tuple[Parts, int, IndexCode]:
        parts = _support.parts_of(shape, granularity)
        room = _support.room_for(density, parts) if parts.size else 0
        # An unused entry has the index `number`, one past the last part.
        return parts, room, choose_layout(room, parts.number + 1, distinct=False)

    def encode(context: Context, x: jax.Array) -> tuple[SparsePayload, Memory]:
        parts, room, layout = cut(x.shape)
        if not room:
            return SparsePayload(jnp.zeros(0, jnp.uint32), jnp.zeros(0, dtype)), context.memory
        relative = over_peak(x, jnp.max(jnp.abs(x)))  # Its squares neither overflow nor vanish.
        squares = _support.rows_of(jnp.square(relative), parts)
        wanted = _bits.unpack_bits(_support.bitmap(x, parts), parts.number)
        indices, dropped = select(jnp.sum(squares, axis=1), wanted, room)
        values = _support.take(x, indices.astype(jnp.int32), parts)
        payload = SparsePayload(pack_indices(indices, layout), values.astype(dtype))
        return payload, context.memory._replace(report=Overflow(dropped))

    def decode(context: Context, payload: SparsePayload) -> jax.Array:
        parts, room, layout = cut(context.shape)
        if not room:
            return jnp.zeros(context.shape, jnp.float32)
        chosen = unpack_indices(payload.indices, layout).astype(jnp.int32)
        into = _support.nothing(parts, jnp.float32)
        values = payload.values.astype(jnp.float32) / context.count
        return _support.whole(_support.put(values, chosen, parts, into), context.shape)

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        return Diagnostics(x, totals=overflow_totals(after))

    drop_overflow = Codec(
        encode=encode,
        decode=decode,
        diagnose=diagnose,
        claims=Claims(contraction=lambda size, workers: density),
    )
    return choose_form(overflow, drop_overflow=drop_overflow, strict=sent_as_nan(drop_overflow))
