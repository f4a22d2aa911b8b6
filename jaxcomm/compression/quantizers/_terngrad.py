"""Ternary codes: minus one, zero, or plus one times the largest magnitude."""

import jax
import jax.numpy as jnp

from jaxcomm._contract import Claims, Codec, Context, Fast, Memory, PyTree
from jaxcomm.compression._integers import rounded_normal
from jaxcomm.compression._means import over_peak
from jaxcomm.compression.quantizers._dither import dither


def _clipped(x: jax.Array, clip: float) -> jax.Array:
    """Clips `x` to `clip` root mean squares, computed without overflow for huge coordinates."""
    peak = jnp.max(jnp.abs(x), initial=0)
    unit = over_peak(x, peak)
    deviation = jnp.sqrt(jnp.sum(jnp.square(unit)) / float(max(x.size, 1)))
    limit = peak * jnp.minimum(clip * deviation, 1)
    return jnp.clip(x, -limit, limit)


def ternary(*, clip: float | None = None) -> Codec:
    r"""TernGrad's codes: unbiased rounding of each magnitude to the largest one or to 0.

    .. math:: Q(x)_j = s\, \operatorname{sgn}(x_j)\, b_j, \qquad
              P(b_j = 1) = \frac{|x_j|}{s}, \qquad s = \max_j |x_j|

    .. math:: \mathbb{E}\, Q(x) = x, \qquad
              \mathbb{E}\|Q(x) - x\|^2 = s \|x\|_1 - \|x\|^2 \le \frac{\sqrt d - 1}{2} \|x\|^2

    This is :func:`dither` with one level. The bound is attained. One worker's codes take 2 bits per
    coordinate. If workers share the scale (the largest over workers), codes are added in fields of
    :math:`b` bits that hold the sum, :math:`2 n < 2^b`, and the equations hold for all :math:`n d`
    coordinates together.

    Args:
      clip: Clips magnitudes first, to this number of standard deviations of the unit (a bucket or a
        leaf). This makes :math:`s` smaller and the codes less noisy, but biased. The paper takes
        2.5. A Python float. Default: no clipping.

    Returns:
      A codec. Without clipping it states its `variance`. `combine` is `"sum"`. The statistic is one
      float32.

    Raises:
      ValueError: If `clip` is not a positive Python number.
      TypeError: If it is differentiated: rounding has no derivative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.quantizers import ternary
      >>> codec, x = ternary(), jnp.array([2.0, -2.0, 0.0])
      >>> context = Context.of(x)
      >>> context = context.replace(statistics=codec.measure(context, x))
      >>> payload, _ = codec.encode(context, x)
      >>> print(codec.decode(context, payload), codec.claims.variance(81, 1))
      [ 2. -2.  0.] 4.0

    References:
      Wen et al., `TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning
      <https://arxiv.org/abs/1705.07878>`_, 2017.

    Differs from the paper: standard deviations are about 0 and not about the mean, so that a leaf
    of one coordinate, or of equal ones, is not clipped to nothing.
    """
    if clip is not None and (
        not isinstance(clip, int | float) or isinstance(clip, bool) or not clip > 0
    ):
        raise ValueError(
            f"`clip` must be a positive Python number of standard deviations, or None, got "
            f"{clip!r}. Under `optax.inject_hyperparams` pass `static_args=('clip',)`."
        )
    codec = dither(levels=1).replace(scope="leaf")
    if clip is None:
        return codec.replace(
            claims=Claims(variance=lambda size, workers: (max(size * workers, 1) ** 0.5 - 1) / 2)
        )

    def measure(context: Context, x: jax.Array) -> PyTree:
        return codec.measure(context, _clipped(x, clip))

    def encode(context: Context, x: jax.Array) -> tuple[PyTree, Memory]:
        return codec.encode(context, _clipped(x, clip))

    clipped = codec.fast.integers._replace(likely=lambda size: rounded_normal(-1, 1, 1 / clip))
    return codec.replace(
        measure=measure,
        encode=encode,
        claims=Claims(),
        layout="concatenated",
        fast=Fast(integers=clipped, add=codec.fast.add),
    )
