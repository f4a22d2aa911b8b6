"""The rows, blocks or coordinates of one worker that are not zero."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm._base import Claims, Codec, Context, Diagnostics, Memory
from jaxcomm.compression import _bits, _support
from jaxcomm.compression._overflow import (
    Overflow,
    Policy,
    choose_form,
    no_overflow,
    overflow_totals,
    sent_as_nan,
)
from jaxcomm.compression._support import Granularity, Parts
from jaxcomm.compression.sparsifiers._indices import (
    Layout,
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
    r"""What is not zero, exactly, as far as there is room: a sparse all-gather.

    .. math:: C(x)_t = \begin{cases} x_t & t \in \operatorname{supp}(x) \\
              0 & \text{otherwise} \end{cases}

    Room is fixed while tracing. Of more parts than it holds, those of the largest norm are sent
    under feedback, which returns the others; without it the update is NaN on all workers, unless
    they are to be dropped. `diagnostics=True` tells how many had no room, as `overflow`.

    Sends 4 bytes for each coordinate that there is room for, and about :math:`2 - \log_2`
    `density` bits for the index of each part, however few are not zero.

    Args:
      density: Of one worker's parts, for which there is room: the largest that was seen.
      granularity: What is sent or left out as a whole: a `"row"` (all but the first axis), an
        `"element"`, or a block of so many coordinates.
      value_dtype: float32, or bfloat16, whose rounding feedback returns.
      overflow: Without feedback, of more parts than there is room for: `"nan"`, or `"drop"` to send
        the largest and lose the others.

    Returns:
      A codec that remembers the `overflow` of the last step and states its `contraction`,
      `density`. `combine` is `None`.

    Raises:
      ValueError: If an option is out of range; when encoding, if `granularity` is `"row"` and the
        unit has one axis.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.sparsifiers import nonzero
      >>> codec, x = nonzero(density=0.5), jnp.zeros((6, 2)).at[1].set(1.0).at[4].set(3.0)
      >>> payload, memory = codec.encode(Context.of(x, memory=codec.init(x)), x)
      >>> payload.values.shape, int(memory.own.overflow)
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

    def cut(shape: tuple[int, ...]) -> tuple[Parts, int, Layout]:
        parts = _support.parts_of(shape, granularity)
        room = _support.room_for(density, parts) if parts.size else 0
        # Room left over names the part beyond the last.
        return parts, room, choose_layout(room, parts.number + 1, distinct=False)

    def encode(context: Context, x: jax.Array) -> tuple[SparsePayload, Memory]:
        parts, room, layout = cut(x.shape)
        if not room:
            return SparsePayload(jnp.zeros(0, jnp.uint32), jnp.zeros(0, dtype)), context.memory
        squares = _support.rows_of(jnp.square(x), parts)
        wanted = _bits.unpack_bits(_support.bitmap(x, parts), parts.number)
        indices, left = select(jnp.sum(squares, axis=1), wanted, room)
        values = _support.take(x, indices.astype(jnp.int32), parts)
        payload = SparsePayload(pack_indices(indices, layout), values.astype(dtype))
        return payload, context.memory._replace(own=Overflow(left))

    def decode(context: Context, payload: SparsePayload) -> jax.Array:
        parts, room, layout = cut(context.shape)
        if not room:
            return jnp.zeros(context.shape)
        chosen = unpack_indices(payload.indices, layout).astype(jnp.int32)
        into = _support.nothing(parts, jnp.float32)
        values = payload.values.astype(jnp.float32) / context.count
        return _support.whole(_support.put(values, chosen, parts, into), context.shape)

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        return Diagnostics(x, totals=overflow_totals(after.own.overflow))

    drop_overflow = Codec(
        encode=encode,
        decode=decode,
        init=lambda x: Memory(no_overflow(), ()),
        diagnose=diagnose,
        claims=Claims(contraction=lambda size, workers: density),
    )
    return choose_form(overflow, drop_overflow=drop_overflow, strict=sent_as_nan(drop_overflow))
