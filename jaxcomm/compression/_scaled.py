"""What wrappers of codecs share, and the scaling that makes an unbiased codec a contraction."""

from collections.abc import Callable
from typing import Any

import jax

from jaxcomm._contract import Claims, Codec, Context, Keys, Memory, PyTree
from jaxcomm._require import checked


def contraction_of(codec: Codec, size: int, workers: int) -> float | None:
    r"""The :math:`\delta` of the bound :math:`\|Q(x) - x\|^2 \le (1 - \delta) \|x\|^2`, if known.

    For an unbiased codec, :math:`\delta = 1 - \omega`, which may be negative.
    """
    variance, contraction, _ = codec.claims
    if contraction is not None:
        return contraction(max(size, 1), workers)
    if variance is not None:
        return 1 - variance(max(size, 1), workers)
    return None


def bounds_at(claims: Claims, of: Callable[[int, int], tuple[int, int]]) -> Claims:
    """The claims whose bounds for `(size, workers)` are those for `of(size, workers)`."""
    variance, contraction, _ = claims
    return claims._replace(
        variance=variance and (lambda *given: variance(*of(*given))),
        contraction=contraction and (lambda *given: contraction(*of(*given))),
    )


def combined_with(combine: Any, keys_of: Callable[[Keys], Keys]) -> Any:
    """The `combine` of a wrapper, from that of a codec whose keys are `keys_of(keys)`."""
    if not callable(combine):
        return combine
    return lambda keys, *payloads: combine(keys_of(keys), *payloads)


def require_contraction(codec: Codec, size: int, workers: int, user: str) -> None:
    """Raises if the residual of feedback might grow without bound.

    A codec with an absolute bound on its error (`bounded`) need not state a relative one.

    Raises:
      ValueError: If the codec is no contraction, or no bound is known.
    """
    delta = contraction_of(codec, size, workers)
    found = "The `claims` of this codec are empty, so no bound is known."
    if delta is not None:
        found = (
            f"This codec's bound is {1 - delta:.3g} for {size} coordinates of {workers} workers. "
            "Use `jaxcomm.compression.scaled(codec)`, smaller blocks, or more levels."
        )
    if not (codec.claims.bounded if delta is None else delta > 0):
        raise ValueError(
            f"`{user}` needs a codec with a relative error below 1: otherwise the residual may "
            f"grow without bound. {found}"
        )


def without_memory(memory: Memory, user: str) -> Memory:
    """The initial memory of what a wrapper wraps; raises if there is any."""
    if jax.tree.leaves(memory):
        raise ValueError(
            f"`{user}` takes codecs without memory: use `error_feedback({user}(...))` instead."
        )
    return memory


def require_unbiased(codec: Codec, user: str) -> Callable[[int, int], float]:
    """The `variance` of an unbiased codec.

    Raises:
      ValueError: If the codec states none.
    """
    if codec.claims.variance is None:
        raise ValueError(f"`{user}` takes an unbiased codec that states its `variance`.")
    return codec.claims.variance


@checked
def scaled(codec: Codec) -> Codec:
    r"""Divides the output of an unbiased codec by :math:`1 + \omega`: the result is a contraction.

    .. math:: C(x) = \frac{Q(x)}{1 + \omega}, \qquad
              \mathbb{E}\|C(x) - x\|^2 \le \Big(1 - \frac{1}{1 + \omega}\Big) \|x\|^2

    for :math:`\mathbb{E}\, Q(x) = x` and :math:`\mathbb{E}\|Q(x) - x\|^2 \le \omega \|x\|^2`.
    Feedback needs this scaling if :math:`\omega \ge 1`. It sends the same payload as `codec`.

    Args:
      codec: An unbiased codec that states its `variance`.

    Returns:
      A biased codec that states its `contraction`, :math:`\delta = 1 / (1 + \omega)`.

    Raises:
      ValueError: If the codec states no variance.

    Example:
      >>> from jaxcomm.compression import scaled
      >>> from jaxcomm.compression.sparsifiers import random_k
      >>> scaled(random_k(k=5)).claims.contraction(100, 1)
      0.05

    References:
      Beznosikov et al., `On Biased Compression for Distributed Learning
      <https://arxiv.org/abs/2002.12410>`_, 2023.
    """
    variance = require_unbiased(codec, "scaled")

    def decode(context: Context, payload: PyTree) -> jax.Array:
        mean = codec.decode(context, payload)
        return mean / (1 + variance(context.size, context.workers))

    inner = codec.fast.with_residual

    def with_residual(
        context: Context, x: jax.Array, kept: jax.Array, divisor: float
    ) -> tuple[PyTree, Memory, jax.Array]:
        assert inner is not None
        by = 1 + variance(context.size, context.workers)
        return inner(context, x, kept, divisor * by)

    return codec.replace(
        decode=decode,
        claims=Claims(contraction=lambda size, workers: 1 / (1 + variance(size, workers))),
        drop_overflow=codec.drop_overflow and scaled(codec.drop_overflow),
        # `measure` and `encode` are the same.
        fast=codec.fast._replace(
            entries=None, factors=None, mapped=None, add=None, with_residual=inner and with_residual
        ),
    )
