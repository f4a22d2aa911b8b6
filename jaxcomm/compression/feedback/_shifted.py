"""Compresses the difference to a shift, which workers and receivers update equally: EF21, DIANA."""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm._contract import Codec, Context, Diagnostics, Memory, PyTree
from jaxcomm._require import Range, checked
from jaxcomm.compression._scaled import require_contraction, require_unbiased
from jaxcomm.compression.feedback._loop import feedback_loop

_UNKNOWN = -1.0


class Sum(NamedTuple):
    """A compensated sum: the rounded sum and its rounding error."""

    total: jax.Array
    rest: jax.Array  # less than the last digit of `total`


def no_sum(x: jax.Array) -> Sum:
    """Zeros like `x`."""
    return Sum(jnp.zeros_like(x), jnp.zeros_like(x))


def add(sum: Sum, x: jax.Array) -> Sum:
    """Adds `x` to the sum, exact up to the digits of `x` below those of `rest`.

    This is Knuth's two-sum. Plain sums of n workers and the plain sum of their means would diverge:
    an increment may be too small for one of them, but not for another.
    """
    increment = x + sum.rest
    total = sum.total + increment
    added = total - sum.total
    return Sum(total, (sum.total - (total - added)) + (increment - added))


class ShiftMemory(NamedTuple):
    """`Memory.shared` of a codec with shifts."""

    shift: Sum  # the mean of the workers' shifts
    rate: jax.Array  # float32[], the step size of shifts; negative before the first step
    inner: PyTree  # the `Memory.shared` of the inner codec


def shifted(
    codec: Codec, rate: Callable[[int, int], float], require: Callable[[int, int], None]
) -> Codec:
    r"""Sends the compressed difference to a shift, and moves the shift by a fraction of it.

    .. math:: m_i = C(x_i - h_i), \qquad h_i \gets h_i + \alpha m_i, \qquad
              \bar x \approx h + \frac{1}{n} \sum_i m_i, \qquad
              h \gets h + \frac{\alpha}{n} \sum_i m_i

    Shifts start at zero. All workers share :math:`h`, the mean of the workers' shifts. This is
    valid only if the aggregator averages decoded payloads exactly: payloads may be summed, but
    merges that round again are unsupported. Shifts are compensated sums, so that the invariant
    holds to rounding after any number of steps.

    Args:
      codec: The codec of the difference.
      rate: `(size, workers) -> alpha`.
      require: `(size, workers) -> None`, raises if the codec is unsuitable.
    """

    def looped(alpha: float) -> Codec:
        return feedback_loop(
            codec,
            initial=no_sum,
            corrected=lambda shift, x: x - shift.total,
            updated=lambda shift, x, sent: add(shift, alpha * sent),
            require=require,
            compensates=True,
            elementwise=True,
        )

    def inner_memory(memory: Memory) -> Memory:
        return memory._replace(shared=memory.shared.inner)

    def inner_context(context: Context) -> Context:
        return context.replace(memory=inner_memory(context.memory))

    loop = looped(0.0)  # For the functions that do not depend on the rate.

    def init(x: jax.Array) -> Memory:
        memory = loop.init(x)
        shared = ShiftMemory(no_sum(x), jnp.float32(_UNKNOWN), memory.shared)
        return memory._replace(shared=shared)

    def encode(context: Context, x: jax.Array) -> tuple[PyTree, Memory]:
        alpha = rate(context.size, context.workers)
        payload, after = looped(alpha).encode(inner_context(context), x)
        shared = context.memory.shared._replace(inner=after.shared)
        return payload, after._replace(shared=shared)

    def finalize(context: Context, payload: PyTree, mean: jax.Array) -> tuple[jax.Array, Memory]:
        moved, after = loop.finalize(inner_context(context), payload, mean)
        shift, alpha = context.memory.shared.shift, rate(context.size, context.workers)
        moved = moved.astype(shift.total.dtype)
        shared = ShiftMemory(add(shift, alpha * moved), jnp.float32(alpha), after.shared)
        return add(shift, moved).total, after._replace(shared=shared)

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        return loop.diagnose(inner_context(context), x, inner_memory(after))

    return loop.replace(
        init=init,
        measure=lambda context, x: loop.measure(inner_context(context), x),
        encode=encode,
        finalize=finalize,
        combine="sum" if codec.combine == "sum" else None,
        diagnose=diagnose,
        # The payload and how it decodes do not change.
        fast=loop.fast._replace(exposes_nonfinite=()),
    )


@checked
def ef21(codec: Codec) -> Codec:
    r"""Tracks each worker's update by an estimate; the result is the mean of the estimates.

    .. math:: m_i^t = C(x_i^t - g_i^t), \qquad g_i^{t+1} = g_i^t + m_i^t, \qquad
              \bar x^t \approx g^{t+1} = g^t + \frac{1}{n} \sum_i m_i^t

    The invariant :math:`g^t = \frac{1}{n} \sum_i g_i^t` holds always; estimates start at 0. As
    updates converge, so do the estimates, :math:`\mathbb{E}\|g_i^{t+1} - x_i\|^2 \le (1 - \delta)
    \|g_i^t - x_i\|^2`, however much data differ by worker. The estimates follow noise in the
    updates with a delay. Unlike with :func:`error_feedback`, no residual is accumulated and sent
    later. Sends the same payload as `codec`.

    Args:
      codec: A contraction, :math:`\mathbb{E}\|C(a) - a\|^2 \le (1 - \delta) \|a\|^2` with
        :math:`\delta > 0`, such as :func:`jaxcomm.compression.sparsifiers.top_k`.

    Returns:
      A codec that keeps two arrays like `x` on each worker, a sum and its rounding error, and two
      that are equal on all workers. Use it with :func:`jaxcomm.all_gather_mean`, or with
      :func:`jaxcomm.all_reduce_mean` if payloads can be summed.

    Raises:
      ValueError: When encoding, if the codec is no contraction or no bound is known. Wrap a codec
        with :math:`\omega \ge 1` in :func:`jaxcomm.compression.scaled`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.feedback import ef21
      >>> from jaxcomm.compression.sparsifiers import top_k
      >>> codec, x = ef21(top_k(k=1)), jnp.array([3.0, 2.0, 1.0])
      >>> context = Context.of(x, memory=codec.init(x))
      >>> for _ in range(3):
      ...     payload, memory = codec.encode(context, x)
      ...     mean = codec.decode(context.received(), payload)
      ...     update, memory = codec.finalize(context.replace(memory=memory), payload, mean)
      ...     context = context.replace(memory=memory)
      ...     print(update)
      [3. 0. 0.]
      [3. 2. 0.]
      [3. 2. 1.]

    References:
      Richtárik et al., `EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
      Feedback <https://arxiv.org/abs/2106.05203>`_, 2021.

    Differs from the paper: estimates start at 0, so that the first one is :math:`C(x_i^0)`. The
    update is the estimate after this step's message, not before it.
    """
    return shifted(
        codec,
        rate=lambda size, workers: 1.0,
        require=lambda size, workers: require_contraction(codec, size, workers, "ef21"),
    )


@checked
def diana(codec: Codec, *, alpha: Annotated[float, Range(least=0, most=1)] | None = None) -> Codec:
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

    def rate(size: int, workers: int) -> float:
        return 1 / (1 + omega(size, workers)) if alpha is None else float(alpha)

    return shifted(codec, rate=rate, require=lambda size, workers: None)
