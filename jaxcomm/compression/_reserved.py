"""Extremes sent by one codec, and the rest by another."""

from typing import NamedTuple

import jax

from jaxcomm._contract import Claims, Codec, Coins, Context, Memory, PyTree
from jaxcomm._require import require_codec
from jaxcomm.compression._scaled import contraction_of


class ReservedPayload(NamedTuple):
    """The payload of one unit."""

    spikes: PyTree  # the payload of the codec of the extremes
    statistics: PyTree  # of the extremes, and of the rest
    rest: PyTree  # the payload of the codec of the rest


def _claims(codec: Codec, spikes: Codec) -> Claims:
    """The bounds on the error of `codec` for what `spikes` leaves."""
    if contraction_of(spikes, 1, 1) is None:
        return Claims()

    def left(size: int) -> float:
        delta = contraction_of(spikes, size, 1)
        assert delta is not None
        return 1 - delta

    variance, contraction, _ = codec.claims
    return Claims(
        variance=variance and (lambda size, workers: variance(size, 1) * left(size)),
        contraction=contraction
        and (lambda size, workers: 1 - (1 - contraction(size, 1)) * left(size)),
    )


def reserved(codec: Codec, spikes: Codec) -> Codec:
    r"""Sends the extremes by `spikes`, and what remains by `codec`: spike reserving.

    .. math:: C(x) = T(x) + Q(x - T(x)), \qquad
              \mathbb{E}\|C(x) - x\|^2 \le \omega\, (1 - \delta) \|x\|^2

    A few large coordinates widen the levels of all others. `reserved(blockwise(dither(bits=4), 64),
    top_k(k=2, block_size=64))` keeps two of each 64 coordinates in float32 and rounds the other 62
    to levels of their own largest magnitude. Sends the payloads of both codecs with their
    statistics: here 4.5 bits per coordinate for the rest, and 2.4 for the extremes.

    Args:
      codec: :math:`Q`, a codec without memory, for :math:`x - T(x)`.
      spikes: :math:`T`, a codec without memory, such as
        :func:`jaxcomm.compression.sparsifiers.top_k`.

    Returns:
      A codec; `combine` is `None`. It is unbiased if `codec` is, whatever `spikes` is: it states
      the `variance` :math:`\omega (1 - \delta)` if `spikes` states a contraction :math:`\delta`.
      Of two contractions it states the `contraction` :math:`1 - (1 - \delta_Q) (1 - \delta)`.

    Raises:
      ValueError: If an argument is not a codec, or, in `init`, if it has memory.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression import reserved
      >>> from jaxcomm.compression.quantizers import dither
      >>> from jaxcomm.compression.sparsifiers import top_k
      >>> codec = reserved(dither(levels=1), top_k(k=1))
      >>> x = jnp.array([0.5, 1000.0, -0.5, 0.5])
      >>> payload, _ = codec.encode(Context.of(x), x)
      >>> print(codec.decode(Context.of(x), payload))
      [ 5.e-01  1.e+03 -5.e-01  5.e-01]

    References:
      Li et al., `Flash Communication: Reducing Tensor Parallelism Bottleneck for Fast Large
      Language Model Inference <https://arxiv.org/abs/2412.04964>`_, 2024.

    Differs from the paper: extremes are those of largest magnitude, and not the least and the
    largest coordinate; they are in float32, with indices in few bits; rounding is unbiased.
    """
    require_codec(codec, user="reserved")
    require_codec(spikes, "spikes", user="reserved")
    spikes = spikes.drop_overflow or spikes  # The rest has what `spikes` drops.

    def of(context: Context, number: int, statistics: PyTree) -> Context:
        """The context of one of both codecs, which must not draw the same numbers."""
        coins = Coins(*(jax.random.fold_in(key, 1) for key in context.coins))
        return context.replace(
            coins=coins if number else context.coins,
            memory=Memory(),
            statistics=statistics,
            workers=1,
            statistics_size=None,
        )

    def once(each: Codec, number: int, context: Context, x: jax.Array) -> tuple[PyTree, PyTree]:
        statistics = each.measure(of(context, number, ()), x)
        return statistics, each.encode(of(context, number, statistics), x)[0]

    def init(x: jax.Array) -> Memory:
        if jax.tree.leaves((codec.init(x), spikes.init(x))):
            raise ValueError(
                "`reserved` takes codecs without memory. Put the feedback outside: "
                "`error_feedback(reserved(codec, spikes))`."
            )
        return Memory()

    def encode(context: Context, x: jax.Array) -> tuple[ReservedPayload, Memory]:
        measured, large = once(spikes, 0, context, x)
        kept = spikes.decode(of(context, 0, measured).received(), large)
        of_rest, rest = once(codec, 1, context, x - kept)
        return ReservedPayload(large, (measured, of_rest), rest), context.memory

    def decode(context: Context, payload: ReservedPayload) -> jax.Array:
        measured, of_rest = payload.statistics
        large = spikes.decode(of(context, 0, measured), payload.spikes)
        return large + codec.decode(of(context, 1, of_rest), payload.rest)

    return Codec(
        encode=encode,
        decode=decode,
        init=init,
        claims=_claims(codec, spikes),
        scope="leaf" if "leaf" in (codec.scope, spikes.scope) else "bucket",
    )
