"""Ternary quantization by a fixed threshold: minus the threshold, zero, or plus the threshold."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm._contract import Claims, Codec, Context, Memory
from jaxcomm.compression.quantizers import _dither
from pallas_kernels._dispatch import nondifferentiable


class FixedThresholdPayload(NamedTuple):
    """The payload of one unit (a bucket or a leaf), or a sum of such payloads over workers."""

    codes: jax.Array  # uint32[ceil(size / lanes)], int8[shape] or int32[shape]


def fixed_threshold(threshold: float) -> Codec:
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
    number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if not number or not 0 < threshold < math.inf:
        raise ValueError(f"`threshold` must be a positive finite number, got {threshold!r}.")

    def encode(context: Context, x: jax.Array) -> tuple[FixedThresholdPayload, Memory]:
        (x,) = nondifferentiable("fixed_threshold", x)
        codes = (x >= threshold).astype(jnp.int32) - (x <= -threshold).astype(jnp.int32)
        field = _dither.choose_field(1, None, context.workers)
        return FixedThresholdPayload(_dither.pack(codes, field)), context.memory

    def decode(context: Context, payload: FixedThresholdPayload) -> jax.Array:
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
