"""Damped error compensation for an unbiased quantizer."""

import jax
import jax.numpy as jnp

from jaxcomm._contract import Codec
from jaxcomm.compression._scaled import require_unbiased
from jaxcomm.compression.feedback._loop import feedback_loop


def _require_fraction(name: str, value: float) -> None:
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"`{name}` must be a Python float in [0, 1], got {value!r}.")


def ecq(codec: Codec, *, alpha: float = 0.2, decay: float = 0.9) -> Codec:
    r"""Adds to each update a fraction of the quantizer's accumulated error.

    .. math:: q^t = Q(x^t + \alpha h^t), \qquad h^{t+1} = \beta h^t + (x^t - q^t)

    The error is the difference to :math:`x`, not to :math:`x + \alpha h`. Older errors have less
    weight: :math:`h^T = \sum_t \beta^{T-1-t} (x^t - q^t)`. Each step is biased toward the residual.
    With :math:`\alpha = \beta = 1` this is :func:`error_feedback`. Sends the same payload as
    `codec`.

    Args:
      codec: An unbiased codec that states its `variance` :math:`\omega`, such as
        :func:`jaxcomm.compression.quantizers.dither`. :math:`\omega` may exceed 1. With the default
        `alpha` and `decay` it must be below 12.75. Use blocks to reach that:
        `blockwise(dither(), 256)`.
      alpha: :math:`\alpha` in [0, 1], the fraction of the error that one step compensates; 0 is
        `codec`.
      decay: :math:`\beta` in [0, 1], what an older error keeps per step.

    Returns:
      A codec that keeps one array like `x` on each worker.

    Raises:
      ValueError: If an option is out of range, or the codec states no variance. When encoding, if
        :math:`\alpha^2 \omega + (\beta - \alpha)^2 \ge 1`, since errors would grow without bound.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.feedback import ecq
      >>> from jaxcomm.compression.quantizers import dither
      >>> codec, x = ecq(dither(levels=1)), jnp.array([2.0, 1.0])
      >>> context = Context.of(x, memory=codec.init(x))
      >>> context = context.replace(statistics=codec.measure(context, x))
      >>> payload, memory = codec.encode(context, x)
      >>> print(memory.own.kept + codec.decode(context.received(), payload))
      [2. 1.]

    References:
      Wu et al., `Error Compensated Quantized SGD and its Applications to Large-scale Distributed
      Optimization <https://arxiv.org/abs/1806.08054>`_, 2018.

    Differs from the paper: any unbiased codec, instead of its uniform quantizer.
    """
    omega = require_unbiased(codec, "ecq")
    _require_fraction("alpha", alpha)
    _require_fraction("decay", decay)

    def require(size: int, workers: int) -> None:
        noise = omega(max(size, 1), workers)
        growth = alpha**2 * noise + (decay - alpha) ** 2
        if growth >= 1:
            raise ValueError(
                f"`ecq` needs alpha^2 omega + (decay - alpha)^2 below 1: otherwise errors grow "
                f"without bound. With `alpha`={alpha}, `decay`={decay} and omega={noise:.3g} for "
                f"{size} coordinates of {workers} workers it is {growth:.3g}. Use a smaller "
                "`alpha`, more levels, or smaller blocks."
            )

    def corrected(error: jax.Array, x: jax.Array) -> jax.Array:
        return x + alpha * error

    return feedback_loop(
        codec,
        initial=jnp.zeros_like,
        corrected=corrected,
        updated=lambda error, x, sent: decay * error + (x - sent),
        require=require,
        compensates=True,
        elementwise=True,
    )
