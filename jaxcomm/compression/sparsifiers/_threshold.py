"""The coordinates above a fixed threshold."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm._base import Claims, Codec, Context, Diagnostics, Memory
from jaxcomm.compression._overflow import (
    Overflow,
    Policy,
    choose_form,
    no_overflow,
    overflow_totals,
    sent_as_nan,
)
from jaxcomm.compression.sparsifiers._indices import Layout, choose_layout
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
    r"""The coordinates of magnitude above :math:`\lambda`, as far as there is room.

    .. math:: C(x)_j = \begin{cases} x_j & |x_j| > \lambda \\ 0 & \text{otherwise} \end{cases},
              \qquad \|C(x) - x\|_\infty \le \lambda

    Room is fixed while tracing, for :math:`k` coordinates. Where more pass, the largest are sent
    under feedback, which returns the others; without it the update is NaN on all workers, unless
    they are to be dropped. `diagnostics=True` tells how many had no room, as `overflow`. No sort
    is needed while there is room. Sends :math:`k` values, and about :math:`2 + \log_2 (d / k)` bits
    for each index, however few pass.

    Biased, and no contraction: of a small :math:`x` nothing is sent. It goes in
    :func:`jaxcomm.compression.feedback.error_feedback` all the same, since its error is bounded
    (`bounded`): what is left out is at most :math:`\lambda` in each coordinate, or, where more
    pass than there is room for, :math:`\|C(x) - x\|^2 \le (1 - k / d) \|x\|^2`.

    Args:
      threshold: :math:`\lambda`, positive: in units of the update, so it has to be chosen for each
        model. `diagnostics=True` helps: `density` far below :math:`k / d` wastes room.
      ratio: :math:`k / d`, in (0, 1]; room for at least one coordinate.
      k: The number itself, in place of `ratio`.
      value_dtype: float32, or bfloat16, whose rounding feedback returns.
      overflow: Without feedback, where more pass than there is room for: `"nan"`, or `"drop"` to
        send the largest and lose the others.

    Returns:
      A codec that remembers the `overflow` of the last step. `combine` is `None`.

    Raises:
      ValueError: If an option is out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.sparsifiers import threshold
      >>> codec, x = threshold(0.7, k=3), jnp.array([1.0, -4.0, 0.5, 2.0])
      >>> context = Context.of(x, memory=codec.init(x))
      >>> payload, memory = codec.encode(context, x)
      >>> print(codec.decode(context, payload), memory.own.overflow)
      [ 1. -4.  0.  2.] 0

    References:
      Strom, `Scalable Distributed DNN Training Using Commodity GPU Cloud Computing
      <https://www.isca-archive.org/interspeech_2015/strom15_interspeech.html>`_, 2015.
      Sahu et al., `Rethinking Gradient Sparsification as Total Error Minimization
      <https://arxiv.org/abs/2108.00951>`_, 2021 (the absolute bound).

    Differs from the papers: room is limited. Strom sends :math:`\pm \lambda` in place of
    :math:`x_j`.
    """
    number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if not number or not 0 < threshold < math.inf:
        raise ValueError(f"`threshold` must be a positive finite number, got {threshold!r}.")
    kept, dtype = make_count(ratio, k), require_value_dtype(value_dtype)

    def layout_of(size: int) -> Layout:
        # Room left over names the coordinate beyond the last.
        return choose_layout(kept(size), size + 1, distinct=False)

    def encode(context: Context, x: jax.Array) -> tuple[SparsePayload, Memory]:
        flat = x.ravel()
        indices, left = select(flat, jnp.abs(flat) > threshold, kept(x.size), jnp.abs)
        payload = to_payload(flat, indices, layout_of(x.size), dtype)
        return payload, context.memory._replace(own=Overflow(left))

    def decode(context: Context, payload: SparsePayload) -> jax.Array:
        layout = layout_of(math.prod(context.shape))
        return from_payload(payload, layout, context.shape) / context.count

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        return Diagnostics(x, totals=overflow_totals(after.own.overflow))

    drop_overflow = Codec(
        encode=encode,
        decode=decode,
        init=lambda x: Memory(no_overflow(), ()),
        diagnose=diagnose,
        claims=Claims(bounded=True),
    )
    return choose_form(overflow, drop_overflow=drop_overflow, strict=sent_as_nan(drop_overflow))
