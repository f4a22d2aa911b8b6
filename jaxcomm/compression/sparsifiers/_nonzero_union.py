"""The rows, blocks or coordinates that are not zero on any worker, side by side."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm import _axis
from jaxcomm._base import Claims, Codec, Context, Diagnostics, Memory
from jaxcomm.compression import _support
from jaxcomm.compression._overflow import Policy, choose_form, decoded_to_nan
from jaxcomm.compression._support import Granularity, Parts


class UnionStatistics(NamedTuple):
    """What workers agree on before encoding."""

    support: Any  # uint32[ceil(parts / 32)], which parts are not zero


class UnionPayload(NamedTuple):
    """One unit on the wire, or the sum of several workers' units."""

    values: jax.Array  # float32[room, width]


def nonzero_union(
    *, density: float, granularity: Granularity = "row", overflow: Policy = "nan"
) -> Codec:
    r"""The union of all workers' supports, compacted: exact where it fits, and summable.

    .. math:: U = \bigcup_i \operatorname{supp}(x_i), \qquad
              C(x)_t = \begin{cases} x_t & t \in U \\ 0 & \text{otherwise} \end{cases}

    Workers agree on a bitmap of :math:`U`; then all know which part stands where, and the parts
    are added like a dense array. Sends 4 bytes for each coordinate that there is room for, and one
    bit a part. More parts than there is room for make the update NaN, but under feedback, or where
    they are to be dropped: as many in a row are sent then, from a random one.

    Args:
      density: Of :math:`U`, for which there is room: at most 1.
      granularity: What is sent or left out as a whole: a `"row"` (all but the first axis), an
        `"element"`, or a block of so many coordinates.
      overflow: Without feedback, of more parts than there is room for: `"nan"`, or `"drop"` to lose
        those that have none.

    Returns:
      A codec that states its `contraction`, `density`. `combine` is
      `"sum"`. With `diagnostics=True`: `union_density`, and `overflow`, the part of the union
      without room.

    Raises:
      ValueError: If an option is out of range; when encoding, if `granularity` is `"row"` and the
        unit has one axis.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm import all_reduce_mean
      >>> from jaxcomm.compression.sparsifiers import nonzero_union
      >>> tx = all_reduce_mean("data", nonzero_union(density=0.5), scope="leaf")
      >>> x = jnp.zeros((2, 4, 1)).at[0, 1].set(2.0).at[1, 3].set(4.0)
      >>> average = jax.jit(jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data"))
      >>> print(average(x)[0].T)
      [[0. 1. 0. 2.]]

    References:
      Fei et al., `Efficient Sparse Collective Communication and its application to Accelerate
      Distributed Deep Learning (OmniReduce) <https://doi.org/10.1145/3452296.3472904>`_, 2021.

    Differs from the paper: there, aggregators ask for the blocks that some worker has, as they
    come; here the bitmap of all is agreed first, and room is fixed while tracing, as XLA needs it.
    """
    _support.require_density(density)
    _support.require_granularity(granularity)

    def cut(shape: tuple[int, ...]) -> tuple[Parts, int]:
        parts = _support.parts_of(shape, granularity)
        return parts, _support.room_for(density, parts) if parts.size else 0

    def measure(context: Context, x: jax.Array) -> UnionStatistics:
        return UnionStatistics(_support.bitmap(x, _support.parts_of(x.shape, granularity)))

    def encode(context: Context, x: jax.Array) -> tuple[UnionPayload, Memory]:
        parts, room = cut(x.shape)
        if not room:
            return UnionPayload(_axis.varying_like(jnp.zeros((0, 1)), x)), context.memory
        chosen = _support.window(context.statistics.support, context.coins.public, room, parts)
        # So that what workers add stays finite; powers of 2 lose nothing.
        values = _support.take(x, chosen, parts) * 2.0 ** -(context.workers - 1).bit_length()
        return UnionPayload(values.reshape(room, parts.width)), context.memory

    def decode(context: Context, payload: UnionPayload) -> jax.Array:
        parts, room = cut(context.shape)
        if not room:
            return jnp.zeros(context.shape)
        chosen = _support.window(context.statistics.support, context.coins.public, room, parts)
        values = payload.values * (2.0 ** (context.workers - 1).bit_length() / context.count)
        into = _support.nothing(parts, jnp.float32)
        return _support.whole(_support.put(values, chosen, parts, into), context.shape)

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        parts, room = cut(x.shape)
        union = _support.coordinates_in(context.statistics.support, parts)
        beyond = jnp.maximum(union - room * parts.width, 0)
        density = (union, jnp.float32(x.size))
        return Diagnostics(x, ratios={"union_density": density, "overflow": (beyond, union)})

    def fits(context: Context, payload: UnionPayload) -> jax.Array:
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
    return choose_form(
        overflow, drop_overflow=drop_overflow, strict=decoded_to_nan(drop_overflow, fits)
    )
