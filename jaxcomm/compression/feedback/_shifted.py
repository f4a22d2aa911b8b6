"""Compresses the difference to a shift, which workers and receivers update equally."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm._contract import Codec, Context, Diagnostics, Memory, PyTree
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
