"""Sends the coordinates above a fixed threshold."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm._contract import Claims, Codec, Context, Diagnostics, Memory
from jaxcomm.compression._overflow import (
    Overflow,
    Policy,
    choose_form,
    overflow_totals,
    sent_as_nan,
)
from jaxcomm.compression.sparsifiers._indices import IndexCode, choose_layout
from jaxcomm.compression.sparsifiers._sparse import (
    SparsePayload,
    from_payload,
    make_count,
    require_value_dtype,
    select,
    to_payload,
)


def threshold(
    threshold: float,
    *,
    ratio: float | None = None,
    k: int | None = None,
    value_dtype: Any = jnp.float32,
    overflow: Policy = "nan",
) -> Codec:
    r"""Sends the coordinates of magnitude above :math:`\lambda`, up to a capacity.

    .. math:: C(x)_j = \begin{cases} x_j & |x_j| > \lambda \\ 0 & \text{otherwise} \end{cases},
              \qquad \|C(x) - x\|_\infty \le \lambda

    The capacity, :math:`k` coordinates, is fixed at trace time. If more exceed the threshold,
    feedback sends the largest and keeps the others for later. Without feedback the update is NaN on
    all workers, unless `overflow="drop"`. `diagnostics=True` reports the number of coordinates over
    the capacity as `overflow`. No sort is needed unless the capacity is exceeded. Always sends
    :math:`k` values, and an index of about :math:`2 + \log_2 (d / k)` bits for each.

    Biased, and no contraction: a small :math:`x` sends nothing. Still,
    :func:`jaxcomm.compression.feedback.error_feedback` accepts it, since its error is bounded
    (`bounded`): the error is at most :math:`\lambda` per coordinate. If more coordinates exceed the
    threshold than fit, :math:`\|C(x) - x\|^2 \le (1 - k / d) \|x\|^2`.

    Args:
      threshold: :math:`\lambda`, positive. It has the units of the update, so it must be chosen for
        each model. `diagnostics=True` helps: a `density` far below :math:`k / d` wastes capacity.
      ratio: :math:`k / d`, in (0, 1]; the capacity is at least one coordinate.
      k: The capacity in coordinates, instead of `ratio`.
      value_dtype: float32, or bfloat16; feedback compensates its rounding.
      overflow: Without feedback, if more coordinates exceed the threshold than fit: `"nan"`, or
        `"drop"` to send the largest and drop the others.

    Returns:
      A codec that reports the `overflow` of a step. `combine` is `None`. Its derivative is
      that of the sent values, for the selection that it made.

    Raises:
      ValueError: If an option is out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.sparsifiers import threshold
      >>> codec, x = threshold(0.7, k=3), jnp.array([1.0, -4.0, 0.5, 2.0])
      >>> context = Context.of(x, memory=codec.init(x))
      >>> payload, memory = codec.encode(context, x)
      >>> print(codec.decode(context, payload), memory.report.overflow)
      [ 1. -4.  0.  2.] 0

    References:
      Strom, `Scalable Distributed DNN Training Using Commodity GPU Cloud Computing
      <https://www.isca-archive.org/interspeech_2015/strom15_interspeech.html>`_, 2015.
      Sahu et al., `Rethinking Gradient Sparsification as Total Error Minimization
      <https://arxiv.org/abs/2108.00951>`_, 2021 (the absolute bound).

    Differs from the papers: the capacity is limited. Strom sends :math:`\pm \lambda` instead of
    :math:`x_j`.
    """
    number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if not number or not 0 < threshold < math.inf:
        raise ValueError(f"`threshold` must be a positive finite number, got {threshold!r}.")
    kept, dtype = make_count(ratio, k), require_value_dtype(value_dtype)

    def layout_of(size: int) -> IndexCode:
        # An unused entry has the index `size`, one past the last coordinate.
        return choose_layout(kept(size), size + 1, distinct=False)

    def encode(context: Context, x: jax.Array) -> tuple[SparsePayload, Memory]:
        flat = x.ravel()
        indices, dropped = select(flat, jnp.abs(flat) > threshold, kept(x.size), jnp.abs)
        payload = to_payload(flat, indices, layout_of(x.size), dtype)
        return payload, context.memory._replace(report=Overflow(dropped))

    def decode(context: Context, payload: SparsePayload) -> jax.Array:
        layout = layout_of(math.prod(context.shape))
        return from_payload(payload, layout, context.shape) / context.count

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        return Diagnostics(x, totals=overflow_totals(after))

    drop_overflow = Codec(
        encode=encode,
        decode=decode,
        diagnose=diagnose,
        claims=Claims(bounded=True),
    )
    return choose_form(overflow, drop_overflow=drop_overflow, strict=sent_as_nan(drop_overflow))
