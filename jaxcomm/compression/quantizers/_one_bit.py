"""1-bit SGD: one bit per coordinate, and the means of the two classes."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm._contract import Claims, Codec, Context, Memory
from jaxcomm.compression import _bits
from jaxcomm.compression._means import mean_where
from pallas_kernels._dispatch import nondifferentiable


class OneBitPayload(NamedTuple):
    """The payload of one unit: one bit per coordinate, set where the coordinate is not negative."""

    bits: jax.Array  # uint32[ceil(size / 32)]


class ClassMeans(NamedTuple):
    """The mean magnitude of each sign, float32[], or float32[columns] for two or more axes."""

    positive: Any  # of non-negative coordinates; 0 if there are none
    negative: Any


def _measure(context: Context, x: jax.Array) -> ClassMeans:
    (x,) = nondifferentiable("one_bit", x)
    over = tuple(range(x.ndim - 1)) if x.ndim > 1 else None
    return ClassMeans(mean_where(x >= 0, x, over), mean_where(x < 0, -x, over))


def _encode(context: Context, x: jax.Array) -> tuple[OneBitPayload, Memory]:
    (x,) = nondifferentiable("one_bit", x)
    return OneBitPayload(_bits.pack_bits(x.ravel() >= 0)), context.memory


def _decode(context: Context, payload: OneBitPayload) -> jax.Array:
    shape, count = context.shape, context.count
    bits = _bits.unpack_bits(payload.bits, math.prod(shape)).reshape(shape)
    above, below = (jnp.broadcast_to(mean / count, shape) for mean in context.statistics)
    return jnp.where(bits, above, -below)


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
        encode=_encode,
        decode=_decode,
        measure=_measure,
        reduce_statistics=ClassMeans("max", "max"),
        # A mean shared by workers whose updates differ in size may err by more than the update.
        claims=Claims(
            contraction=lambda size, workers: 1 / max(size, 1) if workers == 1 else -math.inf
        ),
        scope="leaf",
    )
