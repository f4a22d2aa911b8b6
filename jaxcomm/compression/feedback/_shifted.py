"""What is compressed is the distance to a shift, which workers and receivers move alike."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm._base import Codec, Context, Diagnostics, Memory, PyTree
from jaxcomm.compression.feedback._loop import feedback_loop

_UNKNOWN = -1.0


class Sum(NamedTuple):
    """A sum of many small numbers, with what rounding has taken from it."""

    total: jax.Array
    rest: jax.Array  # less than the last digit of `total`


def no_sum(x: jax.Array) -> Sum:
    """Zeros like `x`."""
    return Sum(jnp.zeros_like(x), jnp.zeros_like(x))


def add(sum: Sum, x: jax.Array) -> Sum:
    """The sum with `x` added, exactly but for the digits of `x` below those of `rest`.

    Knuth's two-sum. Plain sums of n workers, and that of their mean, drift apart: what is too small
    for the one is not for the other.
    """
    more = x + sum.rest
    total = sum.total + more
    taken = total - sum.total
    return Sum(total, (sum.total - (total - taken)) + (more - taken))


class ShiftMemory(NamedTuple):
    """`Memory.shared` of a codec with shifts."""

    shift: Sum  # the mean of the workers' shifts
    rate: jax.Array  # float32[], at which shifts move; negative before the first step
    inner: PyTree  # the `Memory.shared` of the codec inside


def shifted(
    codec: Codec, rate: Callable[[int, int], float], require: Callable[[int, int], None]
) -> Codec:
    r"""Sends the distance to a shift, and moves the shift by a part of what was sent.

    .. math:: m_i = C(x_i - h_i), \qquad h_i \gets h_i + \alpha m_i, \qquad
              \bar x \approx h + \frac{1}{n} \sum_i m_i, \qquad
              h \gets h + \frac{\alpha}{n} \sum_i m_i

    Shifts start at zero. What all share is the mean of the workers' shifts, in so far as the mean
    that an aggregator forms is that of what each worker sent: payloads may be added, and not merged
    with further rounding. Shifts are compensated sums, so that this holds to rounding after any
    number of steps.

    Args:
      codec: The codec of the distance.
      rate: `(size, workers) -> alpha`.
      require: `(size, workers)`, raises where the codec will not do.
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

    def inner(memory: Memory) -> Memory:
        return Memory(memory.own, memory.shared.inner)

    def inside(context: Context) -> Context:
        return context.replace(memory=inner(context.memory))

    loop = looped(0.0)  # For all that does not depend on the rate.

    def init(x: jax.Array) -> Memory:
        memory = loop.init(x)
        shared = ShiftMemory(no_sum(x), jnp.float32(_UNKNOWN), memory.shared)
        return Memory(memory.own, shared)

    def encode(context: Context, x: jax.Array) -> tuple[PyTree, Memory]:
        alpha = rate(context.size, context.workers)
        payload, after = looped(alpha).encode(inside(context), x)
        return payload, Memory(after.own, context.memory.shared._replace(inner=after.shared))

    def finalize(context: Context, payload: PyTree, mean: jax.Array) -> tuple[jax.Array, Memory]:
        moved, after = loop.finalize(inside(context), payload, mean)
        shift, alpha = context.memory.shared.shift, rate(context.size, context.workers)
        moved = moved.astype(shift.total.dtype)
        shared = ShiftMemory(add(shift, alpha * moved), jnp.float32(alpha), after.shared)
        return add(shift, moved).total, Memory(after.own, shared)

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        return loop.diagnose(inside(context), x, inner(after))

    return loop._replace(
        init=init,
        measure=lambda context, x: loop.measure(inside(context), x),
        encode=encode,
        finalize=finalize,
        combine="sum" if codec.combine == "sum" else None,
        diagnose=diagnose,
    )
