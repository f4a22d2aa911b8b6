"""Stochastic rounding to levels that follow the distribution of the coordinates."""

import math
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _noise
from jaxcomm._contract import Claims, Codec, Context, Diagnostics, Memory
from jaxcomm._require import Range, checked
from jaxcomm.compression import _bits
from jaxcomm.compression._bits import CodesPayload
from jaxcomm.compression._means import lift_of, over_peak
from pallas_kernels._dispatch import nondifferentiable

_SWEEPS, _SAMPLED = 8, 512
# A level stays at least this fraction of the distance between its two neighbors from either one.
_MARGIN = 2.0**-8


class Levels(NamedTuple):
    """The statistic: the positive levels in ascending order; the last is the largest magnitude."""

    levels: Any  # float32[s]


def fit_levels(sample: jax.Array, weights: jax.Array, levels: int) -> jax.Array:
    r"""Fits levels of least variance to a weighted sample, by coordinate descent.

    .. math:: \min_l \sum_r w_r (l_{i + 1} - r) (r - l_i), \qquad l_i \le r < l_{i + 1}

    Each level in turn is set to the solution of its stationarity condition between its neighbors
    :math:`a < l < c`:

    .. math:: \sum_{a < r \le l} w_r (r - a) = \sum_{l < r \le c} w_r (c - r) \iff
              \sum_{l < r \le c} w_r = \sum_{a < r \le c} w_r \frac{r - a}{c - a}

    The start is a geometric series, which long tails need. From equally spaced levels the descent
    takes longer and ends in worse minima.

    Args:
      sample: float32[m] in [0, 1].
      weights: float32[m], positive.
      levels: :math:`s`.

    Returns:
      float32[s] in ascending order; the last is 1.
    """
    ordered, weights = lax.sort((sample, weights), num_keys=1)
    up_to = jnp.cumsum(weights)

    def at(weight: jax.Array) -> jax.Array:
        """The smallest sample point whose cumulative weight exceeds `weight`."""
        place = jnp.sum(up_to <= weight, dtype=jnp.int32)
        return ordered[jnp.minimum(place, ordered.size - 1)]

    def moved(below: jax.Array, above: jax.Array) -> jax.Array:
        spread = above - below
        under = ordered <= above
        inside = under & (ordered > below)
        weight_above = jnp.sum(jnp.where(inside, weights * ((ordered - below) / spread), 0))
        level = at(jnp.sum(jnp.where(under, weights, 0)) - weight_above)
        return jnp.clip(level, below + _MARGIN * spread, above - _MARGIN * spread)

    def sweep(_: jax.Array, fitted: jax.Array) -> jax.Array:
        ladder = [jnp.zeros_like(fitted[0]), *fitted]
        for j in range(1, levels):
            ladder[j] = moved(ladder[j - 1], ladder[j + 1])
        return jnp.stack(ladder[1:])

    zeros = jnp.sum(jnp.where(ordered > 0, 0, weights))
    common = jnp.clip(at(zeros + 0.3 * (up_to[-1] - zeros)), 2.0**-20, 0.5)
    start = common ** (1 - jnp.arange(1, levels + 1, dtype=jnp.float32) / levels)
    return lax.fori_loop(0, _SWEEPS, sweep, start)


def _sampled(magnitudes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first coordinate of each stride, weighted by the stride, and the largest, of weight 1."""
    stride = -(-magnitudes.size // _SAMPLED)
    blocks = jnp.pad(magnitudes, (0, -magnitudes.size % stride)).reshape(-1, stride)
    sample = jnp.concatenate([blocks[:, 0], jnp.max(blocks, axis=1)])
    return sample, jnp.repeat(jnp.array([stride, 1], jnp.float32), len(blocks))


@checked
def adaptive_levels(*, levels: Annotated[int, Range(least=1, most=127)] = 3) -> Codec:
    r"""Unbiased stochastic rounding to levels fitted to the array for least variance.

    .. math:: Q(x)_j = \operatorname{sgn}(x_j) \cdot \begin{cases}
              l_{i+1} & \text{with probability } \frac{|x_j| - l_i}{l_{i+1} - l_i} \\
              l_i & \text{otherwise} \end{cases}, \qquad l_i \le |x_j| \le l_{i+1}

    .. math:: \mathbb{E}\, Q(x) = x, \qquad \mathbb{E}\|Q(x) - x\|^2 =
              \sum_j (l_{i+1} - |x_j|) (|x_j| - l_i)
              \le \frac{\sqrt d - 1}{2} \|x\|^2

    with :math:`0 = l_0 < l_1 < \ldots < l_s = \max |x|`. In each step, coordinate descent chooses
    the levels between 0 and the maximum. It minimizes the variance of a sample of 512 coordinates
    at equal strides, each with the weight of its stride. The largest coordinate of each stride is
    added: the sample would otherwise miss the few that cause most of the variance.
    The codec is unbiased and the bound holds for any levels: with :math:`m = \max |x|` each term is
    at most :math:`(m - |x_j|) |x_j|`, the variance of ternary codes. The bound does not show the
    gain in practice: if few coordinates are large and many small, equally spaced levels are rarely
    used.

    Sends :math:`\lceil \log_2 (2 s + 2) \rceil` bits per coordinate and :math:`s` float32.

    Args:
      levels: :math:`s`, the number of positive levels; a Python int of at most 127. 1, 3, 7, ...
        use all codes of their width.

    Returns:
      An unbiased codec that states its `variance`. The levels are its statistic,
      separate on each worker. If workers reduce the statistics, each level is the largest over
      workers, and the bound is that of all :math:`n d` coordinates. `combine` is `None`.

    Raises:
      ValueError: If an option is out of range.
      TypeError: If it is differentiated: rounding has no derivative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.quantizers import adaptive_levels
      >>> x = jnp.array([0.1, -0.1, 0.1, -0.1, 0.1, 4.0, -0.1, -8.0])
      >>> print(adaptive_levels(levels=3).measure(Context.of(x), x).levels)
      [0.1 4.  8. ]

    References:
      Faghri et al., `Adaptive Gradient Quantization for Data-Parallel SGD
      <https://arxiv.org/abs/2010.12460>`_, 2020 (ALQ).

    Differs from the paper: levels are fitted in each step to a sample of the unit itself. The paper
    fits a truncated normal distribution to all buckets from time to time. Norms are largest
    magnitudes; no Huffman code follows.
    """
    bits = (2 * levels + 1).bit_length()

    def measure(context: Context, x: jax.Array) -> Levels:
        magnitudes = jnp.abs(*nondifferentiable("adaptive_levels", x.ravel()))
        peak = jnp.max(magnitudes, initial=0)
        if levels == 1 or not x.size:
            return Levels(jnp.broadcast_to(peak, (levels,)))
        drawn, weights = _sampled(magnitudes)
        unit = over_peak(drawn, peak)
        # The last level is 1, so the largest one is exactly the peak.
        return Levels(fit_levels(jnp.minimum(unit, 1), weights, levels) * peak)

    def encode(context: Context, x: jax.Array) -> tuple[CodesPayload, Memory]:
        (x,) = nondifferentiable("adaptive_levels", x)
        flat, fitted = x.ravel(), context.statistics.levels
        lift = lift_of(fitted[-1])
        magnitudes, ladder = jnp.abs(flat) * lift, fitted * lift
        below, index = jnp.zeros_like(magnitudes), jnp.zeros(flat.shape, jnp.uint32)
        above = jnp.broadcast_to(ladder[0], flat.shape)
        for j in range(levels - 1):
            reached = magnitudes >= ladder[j]
            below = jnp.where(reached, ladder[j], below)
            above = jnp.where(reached, ladder[j + 1], above)
            index += reached.astype(jnp.uint32)
        gap = above - below
        part = jnp.where(gap > 0, (magnitudes - below) / jnp.where(gap > 0, gap, 1), 0)
        noise = _noise.bits(context.keys.private, flat.shape) >> 8
        uniform = noise.astype(jnp.float32) * 2.0**-24
        index += (uniform < part).astype(jnp.uint32)
        codes = 2 * index + (flat < 0).astype(jnp.uint32)
        return CodesPayload(_bits.pack_numbers(codes, bits)), context.memory

    def decode(context: Context, payload: CodesPayload) -> jax.Array:
        codes = _bits.unpack_numbers(payload.codes, bits, math.prod(context.shape))
        index, ladder = codes >> 1, context.statistics.levels / context.count
        magnitudes = jnp.zeros(codes.shape, jnp.float32)
        for j in range(levels):
            magnitudes = jnp.where(index == j + 1, ladder[j], magnitudes)
        return jnp.where(codes & 1 == 1, -magnitudes, magnitudes).reshape(context.shape)

    return Codec(
        encode=encode,
        decode=decode,
        measure=measure,
        reduce_statistics=Levels("max"),
        diagnose=lambda context, x, after: Diagnostics(x, constants={"levels": levels}),
        claims=Claims(variance=lambda size, workers: (max(size * workers, 1) ** 0.5 - 1) / 2),
    )
