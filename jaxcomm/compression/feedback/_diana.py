"""DIANA: an unbiased codec whose noise vanishes as updates converge."""

from jaxcomm._contract import Codec
from jaxcomm.compression._scaled import require_unbiased
from jaxcomm.compression.feedback._shifted import shifted


def diana(codec: Codec, *, alpha: float | None = None) -> Codec:
    r"""Quantizes the difference between the update and a shift, which tracks this worker's updates.

    .. math:: m_i = Q(x_i - h_i), \qquad \bar x \approx h + \frac{1}{n} \sum_i m_i, \qquad
              h_i \gets h_i + \alpha m_i, \qquad h \gets h + \frac{\alpha}{n} \sum_i m_i

    Unbiased at each step. The invariant :math:`h = \frac{1}{n} \sum_i h_i` holds always; both start
    at 0. The variance is that of :math:`x_i - h_i` instead of :math:`x_i`. It goes to 0 as
    :math:`h_i` approaches :math:`\nabla f_i(x^*)`, the gradient at the optimum, which is not 0 if
    data differ by worker. Sends the same payload as `codec`.

    Args:
      codec: An unbiased codec that states its `variance` :math:`\omega`, such as
        :func:`jaxcomm.compression.quantizers.dither`.
      alpha: :math:`\alpha`, in [0, 1]; 0 is `codec` itself. Default: :math:`1 / (1 + \omega)`, the
        largest for which the theory holds.

    Returns:
      A codec that keeps two arrays like `x` on each worker, a sum and its rounding error, and two
      that are equal on all workers. Use it with :func:`jaxcomm.all_gather_mean`, or with
      :func:`jaxcomm.all_reduce_mean` if payloads can be summed.

    Raises:
      ValueError: If `alpha` is out of range, or the codec states no variance.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.feedback import diana
      >>> from jaxcomm.compression.quantizers import dither
      >>> codec, x = diana(dither(levels=3)), jnp.array([3.0, 0.1])
      >>> context = Context.of(x, memory=codec.init(x))
      >>> for _ in range(20):
      ...     context = context.replace(statistics=codec.measure(context, x))
      ...     payload, memory = codec.encode(context, x)
      ...     mean = codec.decode(context.received(), payload)
      ...     update, memory = codec.finalize(context.replace(memory=memory), payload, mean)
      ...     context = context.replace(memory=memory)
      >>> print(f"{update[0]:.3f} {update[1]:.3f}")
      3.000 0.100

    References:
      Mishchenko et al., `Distributed Learning with Compressed Gradient Differences
      <https://arxiv.org/abs/1901.09269>`_, 2019.

    Differs from the paper: any unbiased codec, instead of its ternary one.
    """
    omega = require_unbiased(codec, "diana")
    if alpha is not None and (not isinstance(alpha, int | float) or not 0 <= alpha <= 1):
        raise ValueError(f"`alpha` must be a Python float in [0, 1], or None, got {alpha!r}.")

    def rate(size: int, workers: int) -> float:
        return 1 / (1 + omega(size, workers)) if alpha is None else float(alpha)

    return shifted(codec, rate=rate, require=lambda size, workers: None)
