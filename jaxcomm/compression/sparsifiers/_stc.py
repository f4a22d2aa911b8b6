"""Sparse ternary compression: the signs of the largest coordinates, and their mean magnitude."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm._contract import Claims, Codec, Context, Fast, Memory
from jaxcomm.compression import _bits
from jaxcomm.compression._means import mean_where
from jaxcomm.compression.sparsifiers._indices import (
    IndexCode,
    choose_layout,
    integers_of_indices,
    pack_indices,
    unpack_indices,
)
from jaxcomm.compression.sparsifiers._largest import largest
from jaxcomm.compression.sparsifiers._sparse import make_count, to_dense
from pallas_kernels._dispatch import nondifferentiable


class TernaryPayload(NamedTuple):
    """The payload of one unit (a bucket or a leaf)."""

    indices: jax.Array  # uint32[ceil(bits / 32)], as `choose_layout` says
    signs: jax.Array  # uint32[ceil(k / 32)], set where not negative
    mean: jax.Array  # float32[], the magnitude of each coordinate sent


def stc(*, ratio: float | None = None, k: int | None = None) -> Codec:
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
