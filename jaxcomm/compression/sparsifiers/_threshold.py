"""Sends the coordinates above a threshold: a fixed one, or one that follows the updates."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._contract import Claims, Codec, Context, Memory
from jaxcomm._require import AboveZero, Positive, Share, checked
from jaxcomm.compression import _bits
from jaxcomm.compression._bits import require_countable
from jaxcomm.compression._means import how_many, mean_where
from jaxcomm.compression._overflow import (
    Overflow,
    Policy,
    choose_form,
    diagnose_overflow,
    sent_as_nan,
)
from jaxcomm.compression.sparsifiers._largest import largest_of_each_sign, take_largest
from jaxcomm.compression.sparsifiers._sparse import (
    SparsePayload,
    from_payload,
    layout_with_unused,
    make_count,
    pack_indices,
    require_value_dtype,
    select,
    to_dense,
    to_payload,
    unpack_indices,
)
from pallas_kernels._dispatch import nondifferentiable


@checked
def threshold(
    threshold: AboveZero,
    *,
    ratio: Share | None = None,
    k: Positive | None = None,
    value_dtype: Any = jnp.float32,
    overflow: Policy = "nan",
) -> Codec:
    r"""Sends the coordinates of magnitude above :math:`\lambda`, up to a capacity.

    .. math:: C(x)_j = \begin{cases} x_j & |x_j| > \lambda \\ 0 & \text{otherwise} \end{cases},
              \qquad \|C(x) - x\|_\infty \le \lambda

    The capacity, :math:`k` coordinates, is fixed at trace time. If more exceed the threshold,
    feedback sends the largest and keeps the others for later. Without feedback the update is NaN on
    all workers, unless `overflow="drop"`. `diagnostics=True` reports the number of coordinates over
    the capacity as `overflow`. No sort is needed unless the capacity is exceeded. Always sends
    :math:`k` values, and an index of about :math:`2 + \log_2 (d / k)` bits for each.

    Biased, and no contraction: a small :math:`x` sends nothing. Still,
    :func:`jaxcomm.compression.feedback.error_feedback` accepts it, since its error is bounded
    (`bounded`): the error is at most :math:`\lambda` per coordinate. If more coordinates exceed the
    threshold than fit, :math:`\|C(x) - x\|^2 \le (1 - k / d) \|x\|^2`.

    Args:
      threshold: :math:`\lambda`, positive. It has the units of the update, so it must be chosen for
        each model. `diagnostics=True` helps: a `density` far below :math:`k / d` wastes capacity.
      ratio: :math:`k / d`, in (0, 1]; the capacity is at least one coordinate.
      k: The capacity in coordinates, instead of `ratio`.
      value_dtype: float32, or bfloat16; feedback compensates its rounding.
      overflow: Without feedback, if more coordinates exceed the threshold than fit: `"nan"`, or
        `"drop"` to send the largest and drop the others.

    Returns:
      A codec that reports the `overflow` of a step. `combine` is `None`. Its derivative is
      that of the sent values, for the selection that it made.

    Raises:
      ValueError: If an option is out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.sparsifiers import threshold
      >>> codec, x = threshold(0.7, k=3), jnp.array([1.0, -4.0, 0.5, 2.0])
      >>> context = Context.of(x, memory=codec.init(x))
      >>> payload, memory = codec.encode(context, x)
      >>> print(codec.decode(context, payload), memory.report.overflow)
      [ 1. -4.  0.  2.] 0

    References:
      Strom, `Scalable Distributed DNN Training Using Commodity GPU Cloud Computing
      <https://www.isca-archive.org/interspeech_2015/strom15_interspeech.html>`_, 2015.
      Sahu et al., `Rethinking Gradient Sparsification as Total Error Minimization
      <https://arxiv.org/abs/2108.00951>`_, 2021 (the absolute bound).

    Differs from the papers: the capacity is limited. Strom sends :math:`\pm \lambda` instead of
    :math:`x_j`.
    """
    kept, dtype = make_count(ratio, k), require_value_dtype(value_dtype)

    layout_of = layout_with_unused(kept)

    def encode(context: Context, x: jax.Array) -> tuple[SparsePayload, Memory]:
        flat = x.ravel()
        indices, dropped = select(flat, jnp.abs(flat) > threshold, kept(x.size), jnp.abs)
        payload = to_payload(flat, indices, layout_of(x.size), dtype)
        return payload, context.memory._replace(report=Overflow(dropped))

    def decode(context: Context, payload: SparsePayload) -> jax.Array:
        layout = layout_of(math.prod(context.shape))
        return from_payload(payload, layout, context.shape) / context.count

    drop_overflow = Codec(
        encode=encode, decode=decode, diagnose=diagnose_overflow, claims=Claims(bounded=True)
    )
    return choose_form(overflow, drop_overflow, sent_as_nan(drop_overflow))


class TwoMeansPayload(NamedTuple):
    """The payload of one unit (a bucket or a leaf)."""

    indices: jax.Array  # uint32[ceil(bits / 32)], as `choose_layout` says
    signs: jax.Array  # uint32[ceil(capacity / 32)], set where positive
    means: jax.Array  # float32[2], mean magnitudes of positive and of negative coordinates


@checked
def adaptive_threshold(*, ratio: Share) -> Codec:
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

    def capacity_of(size: int) -> int:
        # Rounds down the count of each sign, but to at least 1.
        return min(max(math.floor(ratio * require_countable(size)) + 1, 2), size)

    layout_of = layout_with_unused(capacity_of)

    def encode(context: Context, x: jax.Array) -> tuple[TwoMeansPayload, Memory]:
        (x,) = nondifferentiable("adaptive_threshold", x)
        capacity, flat = capacity_of(x.size), lax.optimization_barrier(x.ravel())
        with_sign = jnp.stack([how_many(flat > 0), how_many(flat < 0)])
        wanted = jnp.floor(ratio * with_sign.astype(jnp.float32)).astype(jnp.int32)
        wanted = jnp.where(with_sign > 0, jnp.clip(wanted, 1, with_sign), 0)
        # For more than 2**24 coordinates the float32 product may round up; both signs must fit.
        wanted = wanted.at[1].min(capacity - wanted[0])
        where = largest_of_each_sign(flat, capacity)
        values = flat[where] * jnp.array([[1.0], [-1.0]], jnp.float32)
        # Non-negative floats have the order of their bits.
        bits = lax.bitcast_convert_type(jnp.maximum(values, 0), jnp.uint32)
        chosen = jax.vmap(take_largest)(bits, wanted)
        means = mean_where(chosen, values, axis=-1)
        # Sorts both signs together; coordinates that are not chosen sort last and are cut off.
        ordered = jnp.where(chosen, where, jnp.uint32(x.size))
        first = lax.broadcasted_iota(jnp.int32, values.shape, 0) == 0
        order, positive = lax.sort((ordered.ravel(), (chosen & first).ravel()), num_keys=1)
        indices = pack_indices(order[:capacity], layout_of(x.size))
        return TwoMeansPayload(indices, _bits.pack_bits(positive[:capacity]), means), context.memory

    def decode(context: Context, payload: TwoMeansPayload) -> jax.Array:
        layout = layout_of(math.prod(context.shape))
        positive = _bits.unpack_bits(payload.signs, layout.entries)
        above, below = payload.means[0] / context.count, payload.means[1] / context.count
        values = jnp.where(positive, above, -below)
        return to_dense(values, unpack_indices(payload.indices, layout), context.shape)

    def contraction(size: int, workers: int) -> float:
        return min(max(ratio / 2, 1 / size), 1 / max(math.floor(ratio * size), 1))

    return Codec(encode=encode, decode=decode, claims=Claims(contraction=contraction), scope="leaf")
