"""How many words a unit gets, and how its integers are cut into rows."""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any, NamedTuple

from jaxcomm._require import require_untraced
from jaxcomm.compression._integers import Alphabet
from jaxcomm.compression._sizes import require_countable
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


def require_room(room: float | None, quantile: float) -> None:
    """Raises unless the room is a positive number of bits, and the quantile a probability."""
    for name, value in (("room", room), ("quantile", quantile)):
        require_untraced(value, name)
    is_number = isinstance(room, int | float) and not isinstance(room, bool)
    if room is not None and not (is_number and 0 < room < math.inf):
        raise ValueError(
            f"`room` must be a positive Python float, the bits per integer, or None, got {room!r}: "
            "it decides shapes on the wire."
        )
    if not isinstance(quantile, float) or not 0.5 <= quantile < 1:
        raise ValueError(f"`quantile` must be a Python float in [0.5, 1), got {quantile!r}.")


def rows_of(count: int, code: RowCode) -> tuple[int, int]:
    """The number of rows, and the length of each: as few as possible, of nearly equal content."""
    rows = -(-count // code.most)
    return rows, -(-count // rows) if rows else 0


def expected_bits(code: RowCode, likely: Any, count: int, quantile: float) -> float:
    """The quantile of the bits of `count` independent integers, with rows of whole words."""
    length = code.expected(likely)
    spread = NormalDist().inv_cdf(quantile) * math.sqrt(max(length.variance, 0) * count)
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
