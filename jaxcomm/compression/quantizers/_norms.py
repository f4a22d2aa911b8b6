r"""Norms of a vector that one collective can reduce over workers.

With :math:`\ell_q` over the coordinates of a worker and :math:`\ell_p` over workers,
:math:`\|x\|_{q,p} = (\sum_i \|x_i\|_q^p)^{1/p}` (Xin et al., 2023). Both norms here have p = q.
"""

from collections.abc import Callable
from statistics import NormalDist
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxcomm.compression._means import over_peak


class Norm(NamedTuple):
    """A norm computed in two steps, between which statistics may be reduced over workers.

    Attributes:
      measure: `x -> statistics`, a NamedTuple of float32[].
      reduce_statistics: the same NamedTuple of `"max"` or `"sum"`.
      value: `statistics -> float32[]`, the norm of one worker's vector, or of all workers' vectors.
      of_normal: `size -> norm` of that many standard normal numbers; of one thousand draws, about
        one is smaller.
    """

    measure: Callable[[jax.Array], "Statistics"]
    reduce_statistics: "Statistics"
    value: Callable[[Any], jax.Array]
    of_normal: Callable[[int], float]


class MaxAbs(NamedTuple):
    """The statistic of the max norm."""

    max_abs: Any


class SumOfSquares(NamedTuple):
    """The statistic of the l2 norm: three sums of squares, since no float32 spans their range."""

    large: Any  # of norms over 2**40, scaled by 2**-80 before squaring
    medium: Any
    small: Any  # of norms under 2**-40, scaled by 2**80 before squaring


Statistics: TypeAlias = MaxAbs | SumOfSquares


def l2_norm(x: jax.Array) -> jax.Array:
    """The l2 norm, finite and exact to rounding whenever it is a normal float32."""
    peak = jnp.max(jnp.abs(x), initial=0)
    return peak * jnp.sqrt(jnp.sum(jnp.square(over_peak(x, peak))))


def _l2_measure(x: jax.Array) -> SumOfSquares:
    norm = l2_norm(x)
    large, small = norm > 2.0**40, norm < 2.0**-40
    return SumOfSquares(
        large=jnp.square(jnp.where(large, norm * 2.0**-80, 0)),
        medium=jnp.square(jnp.where(large | small, 0, norm)),
        small=jnp.square(jnp.where(small, norm * 2.0**80, 0)),
    )


def _l2_value(squares: SumOfSquares) -> jax.Array:
    large, medium, small = map(jnp.sqrt, squares)
    return l2_norm(jnp.stack([large * 2.0**80, medium, small * 2.0**-80]))


def small_peak(size: int) -> float:
    """The largest magnitude of standard normal numbers exceeds it in 999 of 1000 draws."""
    within = 0.001 ** (1 / size)  # The probability that one number does not exceed it.
    return max(-NormalDist().inv_cdf((1 - within) / 2), 0.1) if within < 1 else 0.1


NORMS = {
    "max": Norm(
        measure=lambda x: MaxAbs(jnp.max(jnp.abs(x), initial=0)),
        reduce_statistics=MaxAbs("max"),
        value=lambda statistics: statistics.max_abs,
        of_normal=lambda size: small_peak(size),
    ),
    "l2": Norm(
        measure=_l2_measure,
        reduce_statistics=SumOfSquares("sum", "sum", "sum"),
        value=_l2_value,
        of_normal=lambda size: max(size - 4.4 * size**0.5, 1.0) ** 0.5,
    ),
}
