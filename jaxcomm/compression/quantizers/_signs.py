"""Signs: one bit per coordinate and a magnitude, or none; two means, or a fixed threshold."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm import _noise
from jaxcomm._contract import Claims, Codec, Context, Memory
from jaxcomm._require import AboveZero, checked
from jaxcomm.compression import _bits
from jaxcomm.compression._bits import CodesPayload
from jaxcomm.compression._means import mean_magnitude, mean_where
from jaxcomm.compression.quantizers import _dither
from pallas_kernels._dispatch import nondifferentiable


class SignsPayload(NamedTuple):
    """The payload of one unit: one bit per coordinate, set where it counts as positive."""

    bits: jax.Array  # uint32[ceil(size / 32)]


class MeanAbs(NamedTuple):
    """The statistic of `scaled_signs`."""

    mean_abs: Any  # float32[]


def _encode(context: Context, x: jax.Array) -> tuple[SignsPayload, Memory]:
    return SignsPayload(_bits.pack_bits(x.ravel() >= 0)), context.memory


def _decode(context: Context, payload: SignsPayload, above: Any, below: Any) -> jax.Array:
    positive = _bits.unpack_bits(payload.bits, math.prod(context.shape)).reshape(context.shape)
    decoded = jnp.where(positive, above / context.count, -(below / context.count))
    return decoded.astype(jnp.float32)


# A mean shared by workers whose updates differ in size may err by more than the update.
_CLAIMS = Claims(contraction=lambda size, workers: 1 / max(size, 1) if workers == 1 else -math.inf)


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
        noise = _noise.bits(context.keys.private, zero.shape)
        return SignsPayload(positive | (zero & noise)), context.memory

    return Codec(
        encode=encode,
        decode=lambda context, payload: _decode(context, payload, 1, 1),
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

    return Codec(
        encode=lambda context, x: _encode(context, *nondifferentiable("scaled_signs", x)),
        decode=lambda context, payload: _decode(context, payload, *context.statistics * 2),
        measure=lambda context, x: MeanAbs(mean_magnitude(*nondifferentiable("scaled_signs", x))),
        reduce_statistics=MeanAbs("max"),
        claims=_CLAIMS,
        scope="leaf",
    )


class ClassMeans(NamedTuple):
    """The mean magnitude of each sign, float32[], or float32[columns] for two or more axes."""

    positive: Any  # of non-negative coordinates; 0 if there are none
    negative: Any


def _measure(context: Context, x: jax.Array) -> ClassMeans:
    (x,) = nondifferentiable("one_bit", x)
    over = tuple(range(x.ndim - 1)) if x.ndim > 1 else None
    return ClassMeans(mean_where(x >= 0, x, over), mean_where(x < 0, -x, over))


def one_bit() -> Codec:
    r"""One bit per coordinate, decoded per column as the mean of the coordinates with that bit.

    .. math:: C(x)_j = \begin{cases} \mu_+ & x_j \ge 0 \\ -\mu_- & x_j < 0 \end{cases}, \qquad
              \mu_+ = \operatorname{mean}_{x_j \ge 0} x_j, \qquad
              \mu_- = \operatorname{mean}_{x_j < 0} |x_j|

    A column is the set of coordinates with the same index on the last axis, for arrays of two
    dimensions or more. Therefore the codec defaults to `scope="leaf"`: a bucket would flatten
    leaves. A flat array is one column.

    .. math:: \|C(x) - x\|^2 = \|x\|^2 - \|C(x)\|^2 \le \Big(1 - \frac{1}{d}\Big) \|x\|^2

    The equality holds since :math:`C` projects the coordinates of each sign onto their mean. The
    bound holds since :math:`p` numbers of one sign have :math:`p \mu^2 = \frac{1}{p} (\sum |x_j|)^2
    \ge \frac{1}{p} \sum x_j^2`, where :math:`p` is at most the size of a column. The bound is
    attained if exactly one coordinate is not 0. For normally distributed coordinates the fraction
    :math:`2 / \pi` of the squares is sent. The sum of a column is preserved. Without feedback each
    step moves a coordinate that is 0 by :math:`\mu_+`.

    Sends 1 bit per coordinate, and two float32 per column.

    Returns:
      A biased codec that states its `contraction`; for feedback. The means are statistics, separate
      on each worker. If workers reduce them, or the units of a tree share them, each is the maximum
      of the means, for which no bound holds. `combine` is `None`.

    Raises:
      TypeError: If it is differentiated: rounding has no derivative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.quantizers import one_bit
      >>> codec, x = one_bit(), jnp.array([[1.0, -4.0], [3.0, 2.0], [-1.0, -2.0]])
      >>> context = Context.of(x)
      >>> context = context.replace(statistics=codec.measure(context, x))
      >>> payload, _ = codec.encode(context, x)
      >>> print(codec.decode(context, payload))
      [[ 2. -3.]
       [ 2.  2.]
       [-1. -3.]]

    References:
      Seide et al., `1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
      Distributed Training of Speech DNNs
      <https://www.isca-archive.org/interspeech_2014/seide14_interspeech.html>`_, 2014.
    """
    return Codec(
        encode=lambda context, x: _encode(context, *nondifferentiable("one_bit", x)),
        decode=lambda context, payload: _decode(context, payload, *context.statistics),
        measure=_measure,
        reduce_statistics=ClassMeans("max", "max"),
        claims=_CLAIMS,
        scope="leaf",
    )


@checked
def fixed_threshold(threshold: AboveZero) -> Codec:
    r"""Ternary codes with a fixed threshold :math:`\tau`; no statistics are sent.

    .. math:: C(x)_j = \begin{cases} \tau \operatorname{sgn}(x_j) & |x_j| \ge \tau \\
              0 & \text{otherwise} \end{cases}

    Biased, and no contraction: a small :math:`x` sends nothing, and a large one at most
    :math:`\tau` per coordinate. Under feedback the residual stays bounded (`bounded`) if updates
    are within the threshold, :math:`\|x^t\|_\infty \le \tau`:

    .. math:: |e_j| \le \tau, \; |x_j| \le \tau \;\Rightarrow\;
              |x_j + e_j| \le 2 \tau \;\Rightarrow\; |x_j + e_j - C(x + e)_j| \le \tau

    If the updates of a coordinate exceed the threshold in one direction, step after step, they are
    sent late, and the residual of that coordinate *grows without bound*. In this case clip updates
    first, or choose a larger threshold. The metric `residual_norm` of `diagnostics=True` shows it.

    All workers have the same levels, so codes can be summed: 2 bits per coordinate for one worker,
    and for :math:`n` workers fields of :math:`b` bits that hold the sum, :math:`2 n < 2^b`.

    Args:
      threshold: :math:`\tau`, positive. It has the units of the update, so it must be chosen for
        each model.

    Returns:
      A codec without statistics. `combine` is `"sum"`.

    Raises:
      ValueError: If `threshold` is not a positive finite number.
      TypeError: If it is differentiated: rounding has no derivative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.quantizers import fixed_threshold
      >>> codec, x = fixed_threshold(0.5), jnp.array([0.7, -3.0, 0.2])
      >>> payload, _ = codec.encode(Context.of(x), x)
      >>> print(codec.decode(Context.of(x), payload))
      [ 0.5 -0.5  0. ]

    References:
      Strom, `Scalable Distributed DNN Training Using Commodity GPU Cloud Computing
      <https://www.isca-archive.org/interspeech_2015/strom15_interspeech.html>`_, 2015.

    Differs from the paper: codes are dense. The paper sends an entropy-coded index and a sign for
    each nonzero; :func:`jaxcomm.compression.sparsifiers.threshold` sends indices.
    """

    def encode(context: Context, x: jax.Array) -> tuple[CodesPayload, Memory]:
        (x,) = nondifferentiable("fixed_threshold", x)
        codes = (x >= threshold).astype(jnp.int32) - (x <= -threshold).astype(jnp.int32)
        field = _dither.choose_field(1, None, context.workers)
        return CodesPayload(_dither.pack(codes, field)), context.memory

    def decode(context: Context, payload: CodesPayload) -> jax.Array:
        field = _dither.choose_field(1, None, context.workers)
        codes = _dither.unpack(payload.codes, field, context.count, context.shape)
        return codes.astype(jnp.float32) * (threshold / context.count)

    return Codec(
        encode=encode,
        decode=decode,
        combine="sum",
        claims=Claims(bounded=True),
        layout="shared_statistics",
    )
