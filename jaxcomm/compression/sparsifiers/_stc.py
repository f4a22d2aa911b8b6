"""Sparse ternary and binary compression: the largest coordinates, sent as their mean magnitude."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._contract import Claims, Codec, Context, Fast, Memory
from jaxcomm._require import Positive, Share, checked
from jaxcomm.compression import _bits
from jaxcomm.compression._means import mean_where
from jaxcomm.compression.sparsifiers._largest import largest, largest_of_each_sign, places
from jaxcomm.compression.sparsifiers._sparse import (
    IndexCode,
    choose_layout,
    integers_of_indices,
    layout_with_unused,
    make_count,
    pack_indices,
    to_dense,
    unpack_indices,
)
from pallas_kernels._dispatch import nondifferentiable


class TernaryPayload(NamedTuple):
    """The payload of one unit (a bucket or a leaf)."""

    indices: jax.Array  # uint32[ceil(bits / 32)], as `choose_layout` says
    signs: jax.Array  # uint32[ceil(k / 32)], set where not negative
    mean: jax.Array  # float32[], the magnitude of each coordinate sent


@checked
def stc(*, ratio: Share | None = None, k: Positive | None = None) -> Codec:
    r"""Sparse ternary compression: sends the indices, signs and mean magnitude of the top k.

    .. math:: T_j = \begin{cases} \mu \operatorname{sgn}(x_j) & j \in S = \mathrm{top}_k |x| \\
              0 & \text{otherwise} \end{cases}, \qquad \mu = \frac{1}{k} \sum_{j \in S} |x_j|

    .. math:: \|T - x\|^2 = \|x\|^2 - \|T\|^2 = \|x\|^2 - k \mu^2 \le (1 - \delta) \|x\|^2,
              \qquad \delta = \min\Big(\frac{k}{d}, \frac{1}{k}\Big)

    The equality holds since :math:`T` is a projection of :math:`x`. For the bound, let :math:`L = k
    \mu`, and let :math:`\tau \le L / k` be the least magnitude sent. :math:`\|x\|^2` is largest if
    one coordinate is :math:`L - (k - 1) \tau` and the others are :math:`\tau`. That is convex in
    :math:`\tau`, so it is at most :math:`\max(L^2, d L^2 / k^2)`, while :math:`\|T\|^2 = L^2 / k`.
    The bound is attained: at :math:`1 / k` if exactly one coordinate is not 0, at :math:`k / d` if
    all coordinates are equal.

    Sends an index of about :math:`2 + \log_2 (d / k)` bits and 1 bit per coordinate, and one
    float32. The paper uses feedback on workers and on the server: `two_stage_mean(axis,
    error_feedback(stc(ratio=0.01)))`.

    Args:
      ratio: :math:`k / d`, in (0, 1]; at least one coordinate is sent.
      k: The number of coordinates, instead of `ratio`.

    Returns:
      A biased codec that states its `contraction`. `combine` is `None`.

    Raises:
      ValueError: Unless exactly one of `ratio` and `k` is set, and in range.
      TypeError: If it is differentiated: rounding has no derivative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.sparsifiers import stc
      >>> codec, x = stc(k=2), jnp.array([1.0, -4.0, 0.5, 2.0])
      >>> payload, _ = codec.encode(Context.of(x), x)
      >>> print(codec.decode(Context.of(x), payload))
      [ 0. -3.  0.  3.]

    References:
      Sattler et al., `Robust and Communication-Efficient Federated Learning from Non-IID Data
      <https://arxiv.org/abs/1903.02891>`_, 2019.

    Differs from the paper: indices use the Elias-Fano code, whose length does not depend on the
    data, instead of Golomb's, which is half a bit shorter; that is
    :func:`jaxcomm.compression.codes.golomb_rice` of this codec. Zeros among the :math:`k` are sent
    as :math:`+\mu`.
    """
    kept = make_count(ratio, k)

    def layout_of(size: int) -> IndexCode:
        return choose_layout(kept(size), size)

    def encode(context: Context, x: jax.Array) -> tuple[TernaryPayload, Memory]:
        (x,) = nondifferentiable("stc", x)
        flat = x.ravel()
        indices = largest(flat, kept(x.size), jnp.abs)
        values = flat[indices]
        mean = mean_where(jnp.ones(values.shape, bool), jnp.abs(values))
        packed = pack_indices(indices, layout_of(x.size))
        return TernaryPayload(packed, _bits.pack_bits(values >= 0), mean), context.memory

    def decode(context: Context, payload: TernaryPayload) -> jax.Array:
        layout = layout_of(math.prod(context.shape))
        positive = _bits.unpack_bits(payload.signs, layout.entries)
        mean = payload.mean / context.count
        values = jnp.where(positive, mean, -mean)
        return to_dense(values, unpack_indices(payload.indices, layout), context.shape)

    return Codec(
        encode=encode,
        decode=decode,
        claims=Claims(contraction=lambda size, workers: min(kept(size) / size, 1 / kept(size))),
        scope="leaf",
        fast=Fast(integers=integers_of_indices(kept, layout_of)),
    )


class BinaryPayload(NamedTuple):
    """The payload of one unit (a bucket or a leaf)."""

    indices: jax.Array  # uint32[ceil(bits / 32)], as `choose_layout` says
    mean: jax.Array  # float32[], signed, the value of each coordinate sent


@checked
def sbc(*, ratio: Share | None = None, k: Positive | None = None) -> Codec:
    r"""Sparse binary compression: sends the indices and the mean of the k largest of one sign.

    .. math:: P_\pm = \text{the } k \text{ largest of } \max(\pm x, 0), \qquad
              L_\pm = \sum_{j \in P_\pm} |x_j|

    .. math:: T_j = \begin{cases} \pm L_\pm / m & j \in P_\pm, x_j \ne 0 \\ 0 & \text{otherwise}
              \end{cases} \qquad \text{for the sign of larger } L_\pm

    where :math:`m \le k` coordinates have that sign.

    .. math:: \|T - x\|^2 = \|x\|^2 - m \Big(\frac{L}{m}\Big)^2 \le (1 - \delta) \|x\|^2, \qquad
              \delta = \frac{1}{k + \max(k, (d - 1) / k)}

    (1 at :math:`d = 1`). The equality holds since :math:`T` is a projection of :math:`x`. The bound
    This bound follows from that of :func:`jaxcomm.compression.sparsifiers.stc`: the squares of
    :math:`d_\pm` coordinates of one sign add up to at most :math:`L_\pm^2 \max(1, d_\pm / k^2)`.
    With :math:`L_\pm \le L` and :math:`d_+ + d_- \le d`, the squares of both signs add up to at
    most :math:`L^2 (1 + \max(1, (d - 1) / k^2))`, while :math:`\|T\|^2 = L^2 / m \ge L^2 / k`.

    Sends an index of about :math:`2 + \log_2 (d / k)` bits per coordinate, and one float32. No bits
    are used for values.

    Args:
      ratio: :math:`k / d`, in (0, 1]; at least one coordinate is sent.
      k: The number of coordinates, instead of `ratio`.

    Returns:
      A biased codec that states its `contraction`. `combine` is `None`.

    Raises:
      ValueError: Unless exactly one of `ratio` and `k` is set, and in range.
      TypeError: If it is differentiated: rounding has no derivative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.sparsifiers import sbc
      >>> codec, x = sbc(k=2), jnp.array([1.0, -4.0, 0.5, 2.0, -2.0])
      >>> payload, _ = codec.encode(Context.of(x), x)
      >>> print(codec.decode(Context.of(x), payload))
      [ 0. -3.  0.  0. -3.]

    References:
      Sattler et al., `Sparse Binary Compression: Towards Distributed Deep Learning with Minimal
      Communication <https://arxiv.org/abs/1805.08768>`_, 2018.

    Differs from the paper: indices use the Elias-Fano code, whose length does not depend on the
    data, instead of Golomb's, which is half a bit shorter. If fewer than :math:`k` coordinates have
    a sign, the paper adds coordinates of the other sign. Here the missing ones count as 0 in the
    choice of the sign, and are not sent. Local steps are outside the scope of a codec.
    """
    kept = make_count(ratio, k)

    layout_of = layout_with_unused(kept)

    def encode(context: Context, x: jax.Array) -> tuple[BinaryPayload, Memory]:
        (x,) = nondifferentiable("sbc", x)
        flat = lax.optimization_barrier(x.ravel())
        where = largest_of_each_sign(flat, kept(x.size))
        values = flat[where] * jnp.array([[1.0], [-1.0]], jnp.float32)
        present = values > 0
        all_entries = jnp.ones(values.shape, bool)
        means = mean_where(all_entries, jnp.maximum(values, 0), axis=-1)
        negative = (means[1] > means[0]).astype(jnp.int32)
        mean = mean_where(present[negative], values[negative])
        order = places(present[negative], kept(x.size))
        indices = where[negative].at[order].get(mode="fill", fill_value=x.size)
        packed = pack_indices(indices, layout_of(x.size))
        return BinaryPayload(packed, jnp.where(negative == 1, -mean, mean)), context.memory

    def decode(context: Context, payload: BinaryPayload) -> jax.Array:
        layout = layout_of(math.prod(context.shape))
        values = jnp.broadcast_to(payload.mean / context.count, (layout.entries,))
        return to_dense(values, unpack_indices(payload.indices, layout), context.shape)

    def contraction(size: int, workers: int) -> float:
        count = kept(size)
        return 1 / (count + max(count, (size - 1) / count)) if size > 1 else 1.0

    return Codec(encode=encode, decode=decode, claims=Claims(contraction=contraction), scope="leaf")
