"""Random coordinates, drawn with random bits that all workers share."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm import _noise
from jaxcomm._contract import Claims, Codec, Context, Fast, Memory
from jaxcomm.compression._means import headroom
from jaxcomm.compression.sparsifiers._indices import Selection, choose_layout
from jaxcomm.compression.sparsifiers._selection import count_true, kth_largest
from jaxcomm.compression.sparsifiers._sparse import make_count, to_dense


class RandomKPayload(NamedTuple):
    """The payload of one unit (a bucket or a leaf), or a sum of such payloads over workers."""

    values: jax.Array  # float32[k]


def draw_coordinates(public: jax.Array, size: int, count: int) -> jax.Array:
    """Draws `count` distinct coordinates below `size` uniformly; ascending uint32[count]."""
    if not size:
        return jnp.zeros(0, jnp.uint32)
    # The bits are a bijection of the position: no two are equal, and the `count` largest are
    # unique.
    numbers = _noise.bits(public, (size,))
    (found,) = jnp.nonzero(numbers >= kth_largest(numbers, count, count_true), size=count)
    return found.astype(jnp.uint32)


def random_k(*, ratio: float | None = None, k: int | None = None) -> Codec:
    r""":math:`k` coordinates drawn at random, the same on all workers; unbiased.

    .. math:: Q(x)_j = \begin{cases} \frac{d}{k} x_j & j \in S \\ 0 & \text{otherwise} \end{cases},
              \qquad \mathbb{E}\|Q(x) - x\|^2 = \Big(\frac{d}{k} - 1\Big) \|x\|^2

    where :math:`S` is a new uniformly random set of :math:`k` of :math:`d` coordinates in each
    step. Receivers draw the same set, so only 4 bytes per value are sent, and payloads of all
    workers can be added. The variance is large. :func:`jaxcomm.compression.scaled` removes the
    factor :math:`d / k`: it decodes :math:`x_j` on :math:`S`. Use it inside
    :func:`jaxcomm.compression.feedback.error_feedback`.

    Args:
      ratio: :math:`k / d`, in (0, 1]; at least one coordinate is sent.
      k: The number of coordinates, instead of `ratio`.

    Returns:
      A codec that states its `variance`. `combine` is `"sum"`. Its derivative is that of the sent
      values, for the selection that it made.

    Raises:
      ValueError: If an option is out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.sparsifiers import random_k
      >>> codec, x = random_k(k=2), jnp.ones(6)
      >>> payload, _ = codec.encode(Context.of(x), x)
      >>> payload.values.shape
      (2,)
      >>> print(jnp.sort(codec.decode(Context.of(x), payload)))
      [0. 0. 0. 0. 3. 3.]

    References:
      Stich et al., `Sparsified SGD with Memory <https://arxiv.org/abs/1809.07599>`_, 2018.
      Konečný et al., `Federated Learning: Strategies for Improving Communication Efficiency
      <https://arxiv.org/abs/1610.05492>`_, 2016 (random mask from a seed).
    """
    kept = make_count(ratio, k)

    def encode(context: Context, x: jax.Array) -> tuple[RandomKPayload, Memory]:
        indices = draw_coordinates(context.coins.public, x.size, kept(x.size))
        values = x.ravel()[indices].astype(jnp.float32)
        return RandomKPayload(values * headroom(context.workers)), context.memory

    def decode(context: Context, payload: RandomKPayload) -> jax.Array:
        size = math.prod(context.shape)
        scale = size / max(kept(size), 1) / (context.count * headroom(context.workers))
        indices = draw_coordinates(context.coins.public, size, kept(size))
        return to_dense(payload.values * scale, indices, context.shape)

    return Codec(
        encode=encode,
        decode=decode,
        combine="sum",
        claims=Claims(variance=lambda size, workers: size / kept(size) - 1),
        fast=Fast(
            selection=Selection(
                choose=lambda public, flat: draw_coordinates(public, flat.size, kept(flat.size)),
                layout=lambda size: choose_layout(kept(size), size),
                drawn=True,
                value_dtype=jnp.dtype(jnp.float32),
            )
        ),
    )
