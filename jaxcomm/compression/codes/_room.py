"""The room of a variable-length code in words: from normal coordinates, or from given updates."""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._contract import Codec, Context
from jaxcomm._require import require_codec, require_untraced
from jaxcomm.compression._bits import require_countable
from jaxcomm.compression._integers import Alphabet
from jaxcomm.compression.codes._rows import RowCode, words_of

SLACK = 64
"""Words beyond the room, so that short units, whose lengths vary more, fit."""


HEADER_BITS = 16


class Cut(NamedTuple):
    """How the integers of a unit are cut, and the room of their words."""

    number: int  # integers
    rows: int
    length: int  # integers of a row; the last rows are padded with zeros
    room: int  # words
    plain: int  # how many integers fit into the room in a plain form


FITS = 0.999
"""The probability that a unit of normal, independent coordinates fits into the default room."""


def require_room(room: float | None) -> None:
    """Raises unless the room is a positive number of bits."""
    require_untraced(room, "room")
    is_number = isinstance(room, int | float) and not isinstance(room, bool)
    if room is not None and not (is_number and 0 < room < math.inf):
        raise ValueError(
            f"`room` must be a positive Python float, the bits per integer, or None, got {room!r}: "
            "it decides shapes on the wire."
        )


def rows_of(count: int, code: RowCode) -> tuple[int, int]:
    """The number of rows, and the length of each: as few as possible, of nearly equal content."""
    rows = -(-count // code.most)
    return rows, -(-count // rows) if rows else 0


def expected_bits(code: RowCode, likely: Any, count: int) -> float:
    """The bits in which `count` independent integers fit, with rows of whole words."""
    length = code.expected(likely)
    spread = NormalDist().inv_cdf(FITS) * math.sqrt(max(length.variance, 0) * count)
    rows, _ = rows_of(count, code)
    return length.mean * count + spread + 40 * rows


def cut(
    count: int,
    code: RowCode,
    alphabet: Alphabet,
    room: float | None,
    default: Callable[[int], float],
) -> Cut:
    """Cuts `count` integers into rows, which share `room` bits per integer.

    Args:
      count: The number of integers.
      code: The code.
      alphabet: Their range.
      room: Bits per integer.
      default: `count -> bits`, used if `room` is None.
    """
    rows, length = rows_of(require_countable(count), code)
    most = rows * code.plain_words(length, alphabet)
    if words_of(count * alphabet.width) <= SLACK:
        words = most
    else:
        bits = default(count) if room is None else room * count
        words = min(math.ceil(bits / 32) + SLACK, most)
    return Cut(count, rows, length, words, min(32 * words // alphabet.width, count))


def measured_room(
    codec: Codec, updates: jax.Array, *, quantile: float = 0.999, seed: int = 0
) -> float:
    r"""The bits per integer in which a fraction `quantile` of the given updates fits.

    .. math:: r = \mathrm{quantile}_q\Big(\frac{\ell(x_1)}{m}, \frac{\ell(x_2)}{m}, \ldots\Big)

    with :math:`\ell` the words that the rows of an update take, in bits, for its :math:`m`
    integers. Each update is encoded once, with coins of its own. This does not depend on the room
    of `codec`, and sends nothing. Run it outside of the training program, with updates of the size
    of the units that are sent: a bucket of leaves, or a leaf.

    Args:
      codec: A codec of this package, such as `elias(dither(levels=7), room=8.0)`.
      updates: `[samples, ...]`, updates of one unit, for instance of several steps and workers.
      quantile: The fraction of the updates that fit, a Python float in (0, 1]. With few samples it
        is their largest length.
      seed: The seed of the coins.

    Returns:
      The `room`, a Python float. Units that differ more over time than these need more: a margin
      of some percent avoids overflows.

    Raises:
      ValueError: If `codec` is not a variable-length code, an argument is out of range, or there
        are no updates or no integers.

    Example:
      >>> import jax
      >>> from jaxcomm.compression.codes import elias, measured_room
      >>> from jaxcomm.compression.quantizers import dither
      >>> updates = jax.random.normal(jax.random.key(0), (20, 5_000))
      >>> 2.5 < measured_room(elias(dither(levels=7)), updates) < 4
      True
    """
    require_codec(codec, user="measured_room")
    require_untraced(quantile, "quantile")
    bits_of = codec.fast.bits
    if bits_of is None:
        raise ValueError(
            "`measured_room` needs a codec of `jaxcomm.compression.codes` itself, such as "
            "`elias(dither(levels=7))`, without feedback."
        )
    if not isinstance(quantile, int | float) or not 0 < quantile <= 1:
        raise ValueError(f"`quantile` must be a Python float in (0, 1], got {quantile!r}.")
    if updates.ndim < 2 or not updates.size:
        raise ValueError(
            f"`updates` must be [samples, ...] with at least one coordinate, got the shape "
            f"{updates.shape}."
        )

    @jax.jit
    def lengths(key: jax.Array, x: jax.Array) -> jax.Array:
        coins = Context.of(x).coins._replace(public=key, private=jax.random.fold_in(key, 1))
        context = Context(coins, codec.init(x), shape=x.shape)
        context = context.replace(statistics=codec.measure(context, x))
        payload, _ = codec.encode(context, x)
        return bits_of(context, payload)

    keys = jax.random.split(jax.random.key(seed, impl="threefry2x32"), len(updates))
    bits = jnp.stack(
        [lengths(key, x.astype(jnp.float32)) for key, x in zip(keys, updates, strict=True)]
    )
    return float(np.quantile(np.asarray(bits, np.float64), quantile, method="higher"))
