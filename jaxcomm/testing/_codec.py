"""Checks all laws of a codec."""

from collections.abc import Sequence

from jaxcomm._contract import Claims, Codec
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
    r"""Checks that a codec satisfies the laws of :class:`jaxcomm.Codec` and its own claims.

    Workers are simulated with `jax.vmap` on one device. Nothing is sent. A *unit* is the array that
    the codec encodes. *Coins* are the random keys in its context: the public coin is equal on all
    workers, the private coin is not. The laws, with the names that error messages use:

    - `payload`, `statistics`, `decoded`, `memory types`: the payload is a pytree of arrays,
      statistics have the structure of `reduce_statistics`, `decode` returns float32 of the unit's
      shape, and memory keeps its structure, shapes and dtypes.
    - `same coins`, `jit`, `vmap`: the same coins give the same payload, compiled or not.
    - `receivers decode`: `decode` depends neither on the private coin nor on memory.
    - `entries`, for a codec that states them in `fast`: each coordinate occurs at most once.
    - `layout`, if it is `"shared_statistics"`: statistics of parts combine to those of the whole,
      and with these statistics coordinates are encoded independently.
    - `encode leaves shared memory`: `encode` does not change `memory.shared`.
    - `finalize is equal on all workers`: the update and `memory.shared` that `finalize` returns are
      the same on all workers.
    - `sums`, with `combine="sum"`: the sum of payloads, added in their own dtypes, decodes to the
      mean of the decoded payloads, even if all workers have the extreme value.
    - `unbiased`, `variance`, `contraction`: claims hold on various inputs (normal, heavy-tailed,
      sparse, one-hot, constant, zero, tiny, huge). Each is tested so that a correct codec fails in
      one run of a million.

    If a codec has a variant that drops overflow (`codec.drop_overflow`), NaN from the other variant
    is not a violation.

    Args:
      codec: The codec.
      claims: The bounds to check. Default: `codec.claims`.
      size: The number of coordinates of the unit.
      workers: The numbers of workers to test, which share statistics.
      draws: The number of steps for measuring the claims, each with separate coins.
      seed: The seed of the coins. Inputs are always the same.

    Returns:
      Nothing.

    Raises:
      AssertionError: If a law is violated. The message names the law, the input and the numbers.
      ValueError: If `codec` is not a codec, or rejects the number of workers.

    Example:
      >>> from jaxcomm.compression.quantizers import dither
      >>> from jaxcomm.testing import check_codec
      >>> check_codec(dither(levels=3))
      >>> truncating = dither(levels=3).replace(decode=lambda context, payload: ...)
      >>> check_codec(truncating)
      Traceback (most recent call last):
      AssertionError: law 'decoded': ...
    """
    require_codec(codec)
    claims = codec.claims if claims is None else claims
    for count in workers:
        require_form(codec, size=size, workers=count)
    require_repeats(codec, size=size, seed=seed)
    for count in workers:
        require_memory(codec, size=size, workers=count, seed=seed)
        require_layout(codec, size=size, workers=count, seed=seed)
        if codec.combine == "sum":
            require_sums(codec, workers=count, size=size, seed=seed)
        require_claims(codec, claims, size=size, workers=count, draws=draws, seed=seed)
