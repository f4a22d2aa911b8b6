"""Signs: one bit per coordinate, without a magnitude or with a common one."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm import _noise
from jaxcomm._contract import Claims, Codec, Context, Memory
from jaxcomm.compression import _bits
from jaxcomm.compression._means import mean_magnitude
from pallas_kernels._dispatch import nondifferentiable


class SignsPayload(NamedTuple):
    """The payload of one unit: one bit per coordinate, set where it counts as positive."""

    bits: jax.Array  # uint32[ceil(size / 32)]


class MeanAbs(NamedTuple):
    """The statistic of `scaled_signs`."""

    mean_abs: Any  # float32[]


def _decode(context: Context, payload: SignsPayload, magnitude: Any) -> jax.Array:
    positive = _bits.unpack_bits(payload.bits, math.prod(context.shape)).reshape(context.shape)
    mean = magnitude / context.count
    return jnp.where(positive, mean, -mean).astype(jnp.float32)


def signs() -> Codec:
    r"""The signs of an array, one bit per coordinate; magnitudes are lost.

    .. math:: C(x)_j = \operatorname{sgn}(x_j) \in \{-1, +1\}, \qquad
              P(\operatorname{sgn}(0) = 1) = \tfrac{1}{2}

    For each zero, each worker draws +1 or -1 at random in each step: one bit cannot encode 0, and
    the mean of these draws is 0. Biased, and no contraction, since the result does not shrink with
    `x`. :func:`jaxcomm.majority_vote` counts these bits. For error feedback use
    :func:`scaled_signs`.

    Returns:
      A codec without statistics. Its payload has 1 bit per coordinate, in uint32 words. `combine`
      is `None`.

    Raises:
      TypeError: If it is differentiated: rounding has no derivative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.quantizers import signs
      >>> codec, x = signs(), jnp.array([0.2, -3.0, 4.0])
      >>> payload, _ = codec.encode(Context.of(x), x)
      >>> print(payload.bits, codec.decode(Context.of(x), payload))
      [5] [ 1. -1.  1.]

    References:
      Bernstein et al., `signSGD: Compressed Optimisation for Non-Convex Problems
      <https://arxiv.org/abs/1802.04434>`_, 2018.

    Differs from the paper: zeros get a random sign. The paper's sign leaves them at 0, which one
    bit cannot encode.
    """

    def encode(context: Context, x: jax.Array) -> tuple[SignsPayload, Memory]:
        (x,) = nondifferentiable("signs", x)
        flat = x.ravel()
        positive, zero = _bits.pack_bits(flat > 0), _bits.pack_bits(flat == 0)
        # A word of noise holds one random bit for each coordinate of a word.
        noise = _noise.bits(context.coins.private, zero.shape)
        return SignsPayload(positive | (zero & noise)), context.memory

    return Codec(
        encode=encode,
        decode=lambda context, payload: _decode(context, payload, 1),
        layout="shared_statistics",
    )


def scaled_signs() -> Codec:
    r"""The signs of an array times its mean magnitude.

    .. math:: C(x) = \frac{\|x\|_1}{d} \operatorname{sgn}(x), \qquad
              \|C(x) - x\|^2 = \|x\|^2 - \frac{\|x\|_1^2}{d} = (1 - \delta) \|x\|^2, \qquad
              \delta = \frac{\|x\|_1^2}{d\, \|x\|^2} \ge \frac{1}{d}

    with :math:`\operatorname{sgn}(0) = +1`, for which the identity still holds. For normally
    distributed coordinates :math:`\delta \approx 2 / \pi`. The bound is attained if exactly one
    coordinate is not 0, so a unit should be a leaf rather than many leaves of different scale.
    Biased: use it inside :func:`jaxcomm.compression.feedback.error_feedback`. Without feedback each
    step moves a coordinate that is 0 by the mean magnitude.

    Returns:
      A codec that states its `contraction`, :math:`1 / d`. Its payload has 1 bit per coordinate, in
      uint32 words. Its statistic is one float32. `combine` is `None`: signs with different
      magnitudes cannot be added. The bound and the identity hold for each worker's own magnitude.
      If workers reduce it, or the units of a tree share it, it is the largest of these magnitudes,
      for which no bound holds.

    Raises:
      TypeError: If it is differentiated: rounding has no derivative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.quantizers import scaled_signs
      >>> codec, x = scaled_signs(), jnp.array([1.0, -5.0, 0.0])
      >>> context = Context.of(x)
      >>> context = context.replace(statistics=codec.measure(context, x))
      >>> payload, _ = codec.encode(context, x)
      >>> print(codec.decode(context, payload))
      [ 2. -2.  2.]

    References:
      Karimireddy et al., `Error Feedback Fixes SignSGD and other Gradient Compression Schemes
      <https://arxiv.org/abs/1901.09847>`_, 2019.
    """

    def encode(context: Context, x: jax.Array) -> tuple[SignsPayload, Memory]:
        (x,) = nondifferentiable("scaled_signs", x)
        return SignsPayload(_bits.pack_bits(x.ravel() >= 0)), context.memory

    def decode(context: Context, payload: SignsPayload) -> jax.Array:
        return _decode(context, payload, context.statistics.mean_abs)

    return Codec(
        encode=encode,
        decode=decode,
        measure=lambda context, x: MeanAbs(mean_magnitude(*nondifferentiable("scaled_signs", x))),
        reduce_statistics=MeanAbs("max"),
        # A mean shared by workers whose updates differ in size may err by more than the update.
        claims=Claims(
            contraction=lambda size, workers: 1 / max(size, 1) if workers == 1 else -math.inf
        ),
        scope="leaf",
    )
