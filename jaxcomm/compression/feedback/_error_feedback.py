"""Error feedback: the compression error is added to the next update, or a part of it."""

from typing import Annotated, Any

import jax
import jax.numpy as jnp

from jaxcomm._contract import Codec
from jaxcomm._require import Range, Share, checked
from jaxcomm.compression._scaled import require_contraction, require_unbiased
from jaxcomm.compression.feedback._loop import feedback_loop


def _is_one(option: Any) -> bool:
    return not isinstance(option, jax.core.Tracer) and option == 1


@checked
def error_feedback(
    codec: Codec,
    *,
    decay: Share | jax.Array = 1.0,
    averaging: Share | jax.Array = 1.0,
    residual_dtype: Any = jnp.float32,
) -> Codec:
    r"""Adds the residual, the compression error of earlier updates, to each update.

    .. math:: a^t = x^t + \gamma e^t, \qquad m^t = C(a^t), \qquad
              e^{t+1} = (1 - \beta) e^t + \beta (a^t - m^t)

    :math:`\gamma` is the option `decay`, and :math:`\beta` is `averaging`. With both 1 nothing is
    lost: :math:`\sum_t m^t = \sum_t x^t - e^T`. Sends the same payload as `codec`.

    Args:
      codec: A contraction, :math:`\mathbb{E}\|C(a) - a\|^2 \le (1 - \delta) \|a\|^2` with
        :math:`\delta > 0`, or a codec that is `bounded`, such as a fixed threshold, or blocks of
        coordinates in a cyclic order.
      decay: :math:`\gamma` in (0, 1]; may be traced.
      averaging: :math:`\beta` in (0, 1]; may be traced. Below 1, the residual is an average over
        steps, as in LoCo; :func:`jaxcomm.compression.compressed_memory` keeps it in 8 bits.
      residual_dtype: The dtype of each worker's residual: float32, float64, or bfloat16 for half
        the memory. The rounding error of bfloat16 is lost (1/256 of the residual).

    Returns:
      A codec that keeps one array like `x` on each worker.

    Raises:
      ValueError: If an option is out of range. When encoding, if the codec is no contraction or no
        bound is known. Wrap a codec with :math:`\omega \ge 1` in
        :func:`jaxcomm.compression.scaled`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.feedback import error_feedback
      >>> from jaxcomm.compression.sparsifiers import top_k
      >>> codec, x = error_feedback(top_k(k=1)), jnp.array([2.0, 3.0])
      >>> memory = codec.init(x)
      >>> for _ in range(2):
      ...     payload, memory = codec.encode(Context.of(x, memory=memory), x)
      ...     print(codec.decode(Context.of(x), payload), memory.own.kept)
      [0. 3.] [2. 0.]
      [4. 0.] [0. 3.]

    References:
      Karimireddy et al., `Error Feedback Fixes SignSGD <https://arxiv.org/abs/1901.09847>`_, 2019.
      Stich et al., `Sparsified SGD with Memory <https://arxiv.org/abs/1809.07599>`_, 2018. Xie et
      al., `LoCo <https://arxiv.org/abs/2407.04480>`_, 2024, for `averaging`.

    Differs from the papers: the learning rate is applied afterwards, so a residual is scaled by the
    learning rate of the step that sends it.
    """
    kept = jnp.dtype(residual_dtype)
    if kept not in (jnp.bfloat16, jnp.float32, jnp.float64):
        raise ValueError(f"`residual_dtype` must be float32, bfloat16 or float64, got {kept}.")

    def corrected(residual: jax.Array, x: jax.Array) -> jax.Array:
        return x + jnp.asarray(decay, x.dtype) * residual.astype(x.dtype)

    def updated(residual: jax.Array, x: jax.Array, sent: jax.Array) -> jax.Array:
        error = corrected(residual, x) - sent
        if not _is_one(averaging):
            before, share = residual.astype(x.dtype), jnp.asarray(averaging, x.dtype)
            error = before + share * (error - before)
        return error.astype(kept)

    return feedback_loop(
        codec,
        initial=lambda x: jnp.zeros(x.shape, kept),
        corrected=corrected,
        updated=updated,
        require=lambda size, workers: require_contraction(codec, size, workers, "error_feedback"),
        compensates=True,
        elementwise=True,
        coefficient=decay,
        is_residual=_is_one(decay) and _is_one(averaging),
    )


@checked
def ecq(
    codec: Codec,
    *,
    alpha: Annotated[float, Range(least=0, most=1)] = 0.2,
    decay: Annotated[float, Range(least=0, most=1)] = 0.9,
) -> Codec:
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

    def require(size: int, workers: int) -> None:
        noise = omega(max(size, 1), workers)
        growth = alpha**2 * noise + (decay - alpha) ** 2
        if growth >= 1:
            raise ValueError(
                f"`ecq` needs alpha^2 omega + (decay - alpha)^2 below 1, but it is {growth:.3g} "
                f"for omega={noise:.3g}, {size} coordinates of {workers} workers: use more levels."
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
