"""Adaptive thresholds: sends a fraction of the coordinates of each sign, as their mean."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._contract import Claims, Codec, Context, Memory
from jaxcomm.compression import _bits
from jaxcomm.compression._bits import require_countable
from jaxcomm.compression._means import how_many, mean_where
from jaxcomm.compression.sparsifiers._indices import (
    IndexCode,
    choose_layout,
    pack_indices,
    unpack_indices,
)
from jaxcomm.compression.sparsifiers._largest import largest_of_each_sign
from jaxcomm.compression.sparsifiers._selection import take_largest
from jaxcomm.compression.sparsifiers._sparse import make_count, to_dense
from pallas_kernels._dispatch import nondifferentiable


class TwoMeansPayload(NamedTuple):
    """The payload of one unit (a bucket or a leaf)."""

    indices: jax.Array  # uint32[ceil(bits / 32)], as `choose_layout` says
    signs: jax.Array  # uint32[ceil(capacity / 32)], set where positive
    means: jax.Array  # float32[2], mean magnitudes of positive and of negative coordinates


def adaptive_threshold(*, ratio: float) -> Codec:
    r"""Sends the largest coordinates of each sign, in the same fraction, as the mean of each sign.

    .. math:: m_\pm = \max(\lfloor r\, p_\pm \rfloor, 1), \qquad
              T_j = \begin{cases} \pm \mu_\pm & j \in \mathrm{top}_{m_\pm} (\pm x)  \\
              0 & \text{otherwise} \end{cases}, \qquad
              \mu_\pm = \frac{1}{m_\pm} \sum_{j \in \mathrm{top}_{m_\pm}} |x_j|

    where :math:`p_\pm` coordinates have that sign, and :math:`r` is the option `ratio`. Each step
    finds the largest coordinates again.

    .. math:: \|T - x\|^2 = \|x\|^2 - m_+ \mu_+^2 - m_- \mu_-^2 \le (1 - \delta) \|x\|^2, \qquad
              \delta = \min\Big(\max\Big(\frac{r}{2}, \frac{1}{d}\Big),
              \frac{1}{\max(\lfloor r d \rfloor, 1)}\Big)

    The bound holds since for each sign, as for :func:`jaxcomm.compression.sparsifiers.stc`, a
    fraction of at least :math:`\min(m / p, 1 / m)` of the squares is sent, and :math:`m \ge r p /
    2`.

    Sends an index of about :math:`2 - \log_2 r` bits and 1 bit for each coordinate sent, and two
    float32. The capacity is :math:`\lfloor r d \rfloor + 1` coordinates, which always suffices.

    Args:
      ratio: :math:`r` in (0, 1]; at least one coordinate of each sign is sent.

    Returns:
      A biased codec that states its `contraction`. `combine` is `None`.

    Raises:
      ValueError: If `ratio` is out of range.
      TypeError: If it is differentiated: rounding has no derivative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.sparsifiers import adaptive_threshold
      >>> codec, x = adaptive_threshold(ratio=0.5), jnp.array([1.0, -4.0, 0.5, 2.0, -3.0, 4.0])
      >>> payload, _ = codec.encode(Context.of(x), x)
      >>> print(codec.decode(Context.of(x), payload))
      [ 0. -4.  0.  3.  0.  3.]

    References:
      Dryden et al., `Communication Quantization for Data-Parallel Training of Deep Neural Networks
      <https://doi.org/10.1109/MLHPC.2016.004>`_, 2016.

    Differs from the paper: the largest are found exactly, and no Huffman code follows.
    """
    if ratio is None:
        raise ValueError("`ratio` must be a Python float in (0, 1], got None.")
    make_count(ratio, None)

    def capacity(size: int) -> int:
        # Rounds down the count of each sign, but to at least 1.
        return min(max(math.floor(ratio * require_countable(size)) + 1, 2), size)

    def layout_of(size: int) -> IndexCode:
        # An unused entry has the index `size`, one past the last coordinate.
        return choose_layout(capacity(size), size + 1, distinct=False)

    def encode(context: Context, x: jax.Array) -> tuple[TwoMeansPayload, Memory]:
        (x,) = nondifferentiable("adaptive_threshold", x)
        room, flat = capacity(x.size), lax.optimization_barrier(x.ravel())
        with_sign = jnp.stack([how_many(flat > 0), how_many(flat < 0)])
        wanted = jnp.floor(ratio * with_sign.astype(jnp.float32)).astype(jnp.int32)
        wanted = jnp.where(with_sign > 0, jnp.clip(wanted, 1, with_sign), 0)
        # For more than 2**24 coordinates the float32 product may round up; both signs must fit.
        wanted = wanted.at[1].min(room - wanted[0])
        where = largest_of_each_sign(flat, room)
        values = flat[where] * jnp.array([[1.0], [-1.0]], jnp.float32)
        # Non-negative floats have the order of their bits.
        bits = lax.bitcast_convert_type(jnp.maximum(values, 0), jnp.uint32)
        chosen = jax.vmap(take_largest)(bits, wanted)
        means = mean_where(chosen, values, axis=-1)
        # Sorts both signs together; coordinates that are not chosen sort last and are cut off.
        ordered = jnp.where(chosen, where, jnp.uint32(x.size))
        first = lax.broadcasted_iota(jnp.int32, values.shape, 0) == 0
        order, positive = lax.sort((ordered.ravel(), (chosen & first).ravel()), num_keys=1)
        indices = pack_indices(order[:room], layout_of(x.size))
        return TwoMeansPayload(indices, _bits.pack_bits(positive[:room]), means), context.memory

    def decode(context: Context, payload: TwoMeansPayload) -> jax.Array:
        layout = layout_of(math.prod(context.shape))
        positive = _bits.unpack_bits(payload.signs, layout.entries)
        above, below = payload.means[0] / context.count, payload.means[1] / context.count
        values = jnp.where(positive, above, -below)
        return to_dense(values, unpack_indices(payload.indices, layout), context.shape)

    def contraction(size: int, workers: int) -> float:
        return min(max(ratio / 2, 1 / size), 1 / max(math.floor(ratio * size), 1))

    return Codec(
        encode=encode,
        decode=decode,
        claims=Claims(contraction=contraction),
        scope="leaf",
    )
