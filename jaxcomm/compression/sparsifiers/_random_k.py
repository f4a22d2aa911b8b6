"""Random coordinates: drawn with bits that all workers share, or with a probability for each."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _noise
from jaxcomm._contract import Claims, Codec, Context, Fast, Memory
from jaxcomm._require import Positive, Share, checked
from jaxcomm.compression import _systematic
from jaxcomm.compression._bits import ValuesPayload, require_countable
from jaxcomm.compression._means import count_true, headroom, over_peak
from jaxcomm.compression.sparsifiers._largest import kth_largest
from jaxcomm.compression.sparsifiers._sparse import (
    Selection,
    SparsePayload,
    choose_layout,
    from_payload,
    layout_with_unused,
    make_count,
    pack_indices,
    to_dense,
)
from pallas_kernels._dispatch import nondifferentiable


def draw_coordinates(shared: jax.Array, size: int, count: int) -> jax.Array:
    """Draws `count` distinct coordinates below `size` uniformly; ascending uint32[count]."""
    if not size:
        return jnp.zeros(0, jnp.uint32)
    # The bits are a bijection of the position: no two are equal, and the `count` largest are
    # unique.
    numbers = _noise.bits(shared, (size,))
    (found,) = jnp.nonzero(numbers >= kth_largest(numbers, count, count_true), size=count)
    return found.astype(jnp.uint32)


@checked
def random_k(*, ratio: Share | None = None, k: Positive | None = None) -> Codec:
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

    def encode(context: Context, x: jax.Array) -> tuple[ValuesPayload, Memory]:
        indices = draw_coordinates(context.keys.shared, x.size, kept(x.size))
        values = x.ravel()[indices].astype(jnp.float32)
        return ValuesPayload(values * headroom(context.workers)), context.memory

    def decode(context: Context, payload: ValuesPayload) -> jax.Array:
        size = math.prod(context.shape)
        scale = size / max(kept(size), 1) / (context.count * headroom(context.workers))
        indices = draw_coordinates(context.keys.shared, size, kept(size))
        return to_dense(payload.values * scale, indices, context.shape)

    return Codec(
        encode=encode,
        decode=decode,
        combine="sum",
        claims=Claims(variance=lambda size, workers: size / kept(size) - 1),
        fast=Fast(
            selection=Selection(
                choose=lambda shared, flat: draw_coordinates(shared, flat.size, kept(flat.size)),
                layout=lambda size: choose_layout(kept(size), size),
                drawn=True,
                value_dtype=jnp.dtype(jnp.float32),
            )
        ),
    )


ROUNDS = 2  # of the greedy algorithm, as in the paper
MOST_COORDINATES = 2**28
ROW = 4096


def _sum(x: jax.Array) -> jax.Array:
    """The sum by rows: adding 2**28 numbers one by one in float32 would lose most of them."""
    if x.size <= ROW:
        return jnp.sum(x)
    rows = jnp.sum(jnp.pad(x, (0, -x.size % ROW)).reshape(-1, ROW), axis=1)
    return jnp.sum(lax.optimization_barrier(rows))  # Otherwise XLA merges both sums.


def _greedy(x: jax.Array, count: int) -> jax.Array:
    r"""Probabilities proportional to :math:`|x_j|`, up to 1, with a sum of at most `count`."""
    magnitudes = jnp.abs(x)
    peak = jnp.max(magnitudes, initial=0)
    relative = over_peak(magnitudes, peak)
    total = _sum(relative)
    probabilities = jnp.minimum(relative * (count / jnp.where(total > 0, total, 1)), 1)
    for _ in range(ROUNDS):
        below_one = jnp.where(probabilities < 1, probabilities, 0)
        certain = jnp.sum(probabilities >= 1, dtype=jnp.int32).astype(jnp.float32)
        total = _sum(below_one)
        growth = jnp.where(total > 0, (count - certain) / jnp.where(total > 0, total, 1), 1)
        probabilities = jnp.minimum(probabilities * jnp.maximum(growth, 1), 1)
    return probabilities


def _codes(x: jax.Array, count: int) -> jax.Array:
    """Probabilities in units of `2**-digits`, uint32, whose exact sum is at most `count`."""
    if count == x.size:
        one = jnp.uint32(2 ** _systematic.digits(count))
        return jnp.where(x != 0, one, jnp.uint32(0))
    codes, excess = _systematic.round_up(_greedy(x, count), x, count)
    return jnp.where(excess > 0, _systematic.shrink(codes, count), codes)


@checked
def wangni(*, ratio: Share | None = None, k: Positive | None = None) -> Codec:
    r"""Draws about :math:`k` coordinates with probabilities that grow with magnitude; unbiased.

    .. math:: Q(x)_j = \begin{cases} x_j / p_j & \text{with probability } p_j \\
              0 & \text{otherwise} \end{cases}, \qquad p_j = \min(\lambda |x_j|, 1), \qquad
              \sum_j p_j \le k

    .. math:: \mathbb{E}\|Q(x) - x\|^2 = \sum_j \frac{x_j^2}{p_j} - \|x\|^2
              \le \frac{\|x\|_1^2}{k} - \|x\|^2 \le \Big(\frac{d}{k} - 1\Big) \|x\|^2

    This is the least variance for an expected number of :math:`\sum_j p_j` coordinates. The paper's
    greedy algorithm finds :math:`\lambda`. It starts from :math:`p = \min(k |x| / \|x\|_1, 1)`; two
    rounds then scale up the probabilities below 1 toward the sum :math:`k`. Sends :math:`k` values
    of 4 bytes, and an index of about :math:`2 + \log_2 (d / k)` bits for each.

    Args:
      ratio: :math:`k / d`, in (0, 1]; at least one coordinate is sent.
      k: The number of coordinates, instead of `ratio`.

    Returns:
      A codec that states its `variance`. `combine` is `None`.

    Raises:
      ValueError: If an option is out of range, or, when encoding, if there are more than 2**28
        coordinates.
      TypeError: If it is differentiated: the probabilities of the draw are integers.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.sparsifiers import wangni
      >>> codec, x = wangni(k=2), jnp.array([8.0, 1.0, -1.0, 1.0, 1.0])
      >>> payload, _ = codec.encode(Context.of(x), x)
      >>> q = codec.decode(Context.of(x), payload)
      >>> float(q[0]), float(abs(q[1:]).sum())
      (8.00, 4.00)

    References:
      Wangni et al., `Gradient Sparsification for Communication-Efficient Distributed Optimization
      <https://arxiv.org/abs/1710.09854>`_, 2018.

    Differs from the paper: systematic sampling draws the coordinates with one random offset,
    instead of one random number for each. Each coordinate has the same probability, so mean and
    variance are the same. At most :math:`k` are drawn, so the capacity always suffices.
    Probabilities are rounded up to multiples of :math:`k / 2^{31}`, or of twice that, and values
    are divided by these rounded probabilities.
    """
    kept = make_count(ratio, k)

    layout_of = layout_with_unused(kept)  # Fewer than k may be drawn.

    def encode(context: Context, x: jax.Array) -> tuple[SparsePayload, Memory]:
        require_countable(x.size, MOST_COORDINATES)
        flat, count = x.ravel().astype(jnp.float32), kept(x.size)
        if not x.size:
            empty = jnp.zeros(0, jnp.uint32)
            return SparsePayload(
                pack_indices(empty, layout_of(0)), jnp.zeros(0, jnp.float32)
            ), context.memory
        (flat,) = nondifferentiable("wangni", flat)
        codes = _codes(flat, count)
        indices = _systematic.draw(codes, count, context.keys.private)
        values = (
            (flat * _systematic.inverse_of(codes, count)).at[indices].get(mode="fill", fill_value=0)
        )
        return SparsePayload(pack_indices(indices, layout_of(x.size)), values), context.memory

    def decode(context: Context, payload: SparsePayload) -> jax.Array:
        layout = layout_of(math.prod(context.shape))
        return from_payload(payload, layout, context.shape) / context.count

    def variance(size: int, workers: int) -> float:
        count = kept(size)
        return 0.0 if count == size else _systematic.excess(size, count) - 1

    return Codec(encode=encode, decode=decode, claims=Claims(variance=variance))
