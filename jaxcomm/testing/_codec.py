"""All laws of a codec."""

from collections.abc import Sequence

from jaxcomm._base import Claims, Codec
from jaxcomm._require import require_codec
from jaxcomm.testing._claims import require_claims
from jaxcomm.testing._form import require_form
from jaxcomm.testing._layout import require_layout
from jaxcomm.testing._memory import require_memory
from jaxcomm.testing._repeats import require_repeats
from jaxcomm.testing._sums import require_sums


def check_codec(
    codec: Codec,
    claims: Claims | None = None,
    *,
    size: int = 48,
    workers: Sequence[int] = (1, 3),
    draws: int = 2000,
    seed: int = 0,
) -> None:
    r"""Holds a codec to the laws of :class:`jaxcomm.Codec`, and to what it claims.

    Workers are simulated with `jax.vmap` on one device. Nothing is sent. The laws, by the names
    that messages begin with:

    - `payload`, `statistics`, `decoded`, `memory types`: the payload is a pytree of arrays,
      statistics have the structure of `reduce_statistics`, `decode` returns float32 of the unit's
      shape, and memory keeps its structure, shapes and dtypes.
    - `same coins`, `jit`, `vmap`: the same coins give the same payload, compiled or not.
    - `receivers decode`: `decode` depends neither on the private coin nor on memory.
    - `entries`, of a :class:`jaxcomm.SparseDecode`: no coordinate is told twice.
    - `layout`, where it is `"shared_statistics"`: statistics of parts combine to those of the
      whole, and given these no coordinate depends on another.
    - `encode leaves shared memory`, `finalize is equal on all workers`.
    - `sums`, with `combine="sum"`: what is decoded from the sum of payloads, added in their own
      dtypes, is the mean of what each decodes to; also where all workers hold the extreme.
    - `unbiased`, `variance`, `contraction`: claims hold on unlike inputs (normal, heavy-tailed,
      sparse, one-hot, constant, zero, tiny, huge), each tested so that a codec that is right fails
      in one run of a million.

    Where a codec has a form that drops what finds no room (`codec.drop_overflow`), NaN is no
    failure of the other form.

    Args:
      codec: The codec.
      claims: What its error is held to. Default: `codec.claims`.
      size: Coordinates of the unit.
      workers: The numbers of workers that share statistics, each of which is tried.
      draws: Steps of which claims are measured, each with coins of its own.
      seed: Of the coins. Inputs are always the same.

    Returns:
      Nothing.

    Raises:
      AssertionError: If a law does not hold. The message names the law, the input and the numbers.
      ValueError: If `codec` is none, or refuses so many workers.

    Example:
      >>> from jaxcomm.compression.quantizers import dither
      >>> from jaxcomm.testing import check_codec
      >>> check_codec(dither(levels=3))
      >>> truncating = dither(levels=3)._replace(decode=lambda context, payload: ...)
      >>> check_codec(truncating)
      Traceback (most recent call last):
      AssertionError: law 'decoded': ...
    """
    require_codec(codec)
    claimed = codec.claims if claims is None else claims
    for count in workers:
        require_form(codec, size=size, workers=count)
    require_repeats(codec, size=size, seed=seed)
    for count in workers:
        require_memory(codec, size=size, workers=count, seed=seed)
        require_layout(codec, size=size, workers=count, seed=seed)
        if codec.combine == "sum":
            require_sums(codec, workers=count, size=size, seed=seed)
        require_claims(codec, claimed, size=size, workers=count, draws=draws, seed=seed)
