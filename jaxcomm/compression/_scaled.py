"""Whether a codec is a contraction, and what makes one of an unbiased codec."""

from collections.abc import Callable

import jax

from jaxcomm._base import Claims, Codec, Context, PyTree
from jaxcomm._require import require_codec


def contraction_of(codec: Codec, size: int, workers: int) -> float | None:
    r"""The :math:`\delta` of the bound :math:`\|Q(x) - x\|^2 \le (1 - \delta) \|x\|^2`, if known.

    An unbiased codec has :math:`\delta = 1 - \omega`, which may be negative.
    """
    variance, contraction, _ = codec.claims
    if contraction is not None:
        return contraction(max(size, 1), workers)
    if variance is not None:
        return 1 - variance(max(size, 1), workers)
    return None


def require_contraction(codec: Codec, size: int, workers: int, user: str) -> None:
    """Raises where what is left out might grow without end.

    A codec with an absolute bound (`bounded`) need not state a relative one.

    Raises:
      ValueError: With the reason.
    """
    delta = contraction_of(codec, size, workers)
    if delta is None and codec.claims.bounded:
        return
    if delta is None:
        raise ValueError(
            f"`{user}` needs a codec whose relative error is bounded below 1, and no bound is "
            "known for this one, whose `claims` are empty: what it leaves out might grow "
            "without end."
        )
    if delta <= 0:
        raise ValueError(
            f"`{user}` needs a codec whose relative error is below 1, lest what it leaves out grow "
            f"without end; this one's bound is {1 - delta:.3g} for {size} coordinates of "
            f"{workers} workers. Use `jaxcomm.compression.scaled(codec)`, smaller blocks, or more "
            "levels."
        )


def require_unbiased(codec: Codec, user: str) -> Callable[[int, int], float]:
    """The `variance` of an unbiased codec.

    Raises:
      ValueError: If it states none.
    """
    require_codec(codec, user=user)
    if codec.claims.variance is None:
        raise ValueError(
            f"`{user}` takes an unbiased codec that states its `variance`, and this one states "
            "none: it is biased, or no bound is known."
        )
    return codec.claims.variance


def scaled(codec: Codec) -> Codec:
    r"""Divides what an unbiased codec decodes by :math:`1 + \omega`, which makes it a contraction.

    .. math:: C(x) = \frac{Q(x)}{1 + \omega}, \qquad
              \mathbb{E}\|C(x) - x\|^2 \le \Big(1 - \frac{1}{1 + \omega}\Big) \|x\|^2

    for :math:`\mathbb{E}\, Q(x) = x` and :math:`\mathbb{E}\|Q(x) - x\|^2 \le \omega \|x\|^2`.
    Feedback needs it where :math:`\omega \ge 1`. Sends what `codec` sends.

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

    return codec._replace(
        decode=decode,
        claims=Claims(contraction=lambda size, workers: 1 / (1 + variance(size, workers))),
        drop_overflow=codec.drop_overflow and scaled(codec.drop_overflow),
    )
