"""Variable-length codes one bit after the other, from their formulas; Python integers only."""

import math
from collections.abc import Callable, Sequence

Bits = list[int]
PLAIN, CONSTANT = 31, 30


def number(value: int, width: int) -> Bits:
    """The lowest bit first."""
    return [(value >> i) & 1 for i in range(width)]


def gamma(m: int) -> Bits:
    n = m.bit_length() - 1
    return [0] * n + [1] + number(m, n)


def elias_level(c: int) -> Bits:
    return gamma(abs(c) + 1) + ([int(c < 0)] if c else [])


def rice(gap: int, k: int, width: int) -> Bits:
    if gap >> k >= 16:
        return [0] * 16 + [1] + number(gap, width)
    return [0] * (gap >> k) + [1] + number(gap, k)


def best_rice_parameter(mean: float) -> int:
    if mean == 0:
        return 0
    golden = (1 + math.sqrt(5)) / 2
    ratio = math.log(golden - 1) / math.log(mean / (mean + 1))
    return max(0, 1 + math.floor(math.log2(ratio)))


def elias_levels(row: Sequence[int], low: int, high: int) -> tuple[Bits, int]:
    return [bit for c in row for bit in elias_level(c)], 0


def elias_gaps(row: Sequence[int], low: int, high: int) -> tuple[Bits, int]:
    return [bit for gap in row for bit in gamma(gap + 1)], 0


def rice_gaps(row: Sequence[int], low: int, high: int) -> tuple[Bits, int]:
    k, width = best_rice_parameter(sum(row) / len(row)), max((high - low).bit_length(), 1)
    return [bit for gap in row for bit in rice(gap, k, width)], k


def rice_levels(row: Sequence[int], low: int, high: int) -> tuple[Bits, int]:
    places = [place for place, c in enumerate(row) if c]
    n, width = len(row), len(row).bit_length()
    k = best_rice_parameter((n - len(places)) / (len(places) + 1))
    bits: Bits = []
    last = -1
    for place in places:
        bits += rice(place - last - 1, k, width)
        if max(-low, high) > 1:
            bits += gamma(abs(row[place]))
        bits.append(int(row[place] < 0))
        last = place
    return bits + rice(n - last - 1, k, width), k


def to_words(bits: Bits) -> list[int]:
    padded = bits + [0] * (-len(bits) % 32)
    words = [padded[at : at + 32] for at in range(0, len(padded), 32)]
    return [sum(bit << i for i, bit in enumerate(word)) for word in words]


def rows_of(values: Sequence[int], most: int) -> list[list[int]]:
    number_of_rows = -(-len(values) // most)
    length = -(-len(values) // number_of_rows)
    padded = list(values) + [0] * (number_of_rows * length - len(values))
    return [padded[at : at + length] for at in range(0, len(padded), length)]


def coded(
    values: Sequence[int],
    code: Callable[[Sequence[int], int, int], tuple[Bits, int]],
    low: int,
    high: int,
    most: int = 1024,
) -> tuple[list[int], list[int]]:
    """The headers and the words of all rows."""
    headers, words = [], []
    width = max((high - low).bit_length(), 1)
    for row in rows_of(values, most):
        bits, parameter = code(row, low, high)
        if min(row) == max(row):
            bits, parameter = number(row[0] - low, width), CONSTANT
        elif len(to_words(bits)) >= -(-len(row) * width // 32):
            bits, parameter = [bit for c in row for bit in number(c - low, width)], PLAIN
        headers.append(len(to_words(bits)) | parameter << 11)
        words += to_words(bits)
    return headers, words


def rans_row(row: Sequence[int], counts: Sequence[int], low: int) -> list[int]:
    """A row in rANS with counts of sum 2**14: the state, then its halves, as words."""
    first = [sum(counts[:level]) for level in range(len(counts))]
    state, halves = 2**16, []
    for c in reversed(row):
        count = counts[c - low]
        while state >= count << 18:
            halves.append(state & 0xFFFF)
            state >>= 16
        state = state // count * 2**14 + state % count + first[c - low]
    bits = number(state, 32)
    for half in reversed(halves):
        bits += number(half, 16)
    return to_words(bits)
