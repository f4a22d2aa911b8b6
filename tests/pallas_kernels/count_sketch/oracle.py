"""Count-sketches from the formulas, in NumPy and Python integers; shares nothing with ours."""

import math

import numpy as np

from tests.pallas_kernels.hash_oracle import WORD, word, words


def by_elements(size: int, seeds: tuple[int, int], rows: int, columns: int) -> "list[tuple]":
    """Column and sign of every element in each row, by a hash of each."""
    own = [(word(2 * row, seeds), word(2 * row + 1, seeds)) for row in range(rows)]
    found = [words(size, each) for each in own]
    return [((w * columns // WORD).astype(int), 1 - 2 * (w % 2).astype(int)) for w in found]


def dealt(j: int, round_: int, slots: int, deal: tuple[int, int]) -> int:
    """The slot of the tile that is number j of a round."""
    first, second, third = (word(4 * round_ + i, deal) for i in range(3))
    a, b, c = first | 1, (first // 2**16) | 1, second | 1
    bits = 0
    while 2**bits < slots:
        bits += 1
    size, shift = 2**bits, max(1, (bits + 1) // 2)
    while True:
        j = (j + second // 2**16) * a % size
        j = (j ^ (j >> shift)) * b % size
        j = (j ^ (j >> shift)) * c % size
        if j < slots:
            return (j + third * slots // WORD) % slots


def by_tiles(
    size: int, seeds: tuple[int, int], rows: int, columns: int, planes: int
) -> "list[tuple]":
    """Column, sign, and round of its tile, of every element in each row, by tiles."""
    length = planes * 1024
    slots = columns // length
    result = []
    for row in range(rows):
        keys = [word(8 * row + i, seeds) for i in range(6)]
        lanes = [word(lane, (0, 1)) for lane in range(128)]
        column, sign, order = (np.zeros(size, np.int64) for _ in range(3))
        bits_of: dict[int, int] = {}
        for element in range(size):
            tile, inside = divmod(element, length)
            plane, sublane, lane = inside // 1024, inside // 128 % 8, inside % 128
            if inside == 0:
                round_, j = divmod(tile, slots)
                slot = dealt(j, round_, slots, (keys[0], keys[1]))
                moved = word(tile, (keys[2], keys[3]))
            to_plane = (plane + moved // 2**3) % planes
            to_lane = (lane + moved // 2**8 + moved // 2**15 * (sublane // 2)) % 128
            turn = lanes[to_lane] * (moved | 7) % WORD // 2**29
            to_sublane = (sublane + moved + turn) % 8
            to = (to_plane * 8 + to_sublane) * 128 + to_lane
            column[element] = slot * length + to
            place = tile * length + to  # As if the tile stayed in its place.
            position = place // 4096 * 128 + to_lane
            if position not in bits_of:
                bits_of[position] = word(position, (keys[4], keys[5]))
            bit = place // 1024 % 4 * 8 + to_sublane
            sign[element] = 1 - 2 * (bits_of[position] >> bit & 1)
            order[element] = round_
        result.append((column, sign, order))
    return result


def parts(rounds: int, planes_of_row: int, step: int) -> int:
    """The rounds that are added one after the other, before the sums of such parts are."""
    together = max(1, step // planes_of_row)
    number = max(1, min(64, 512 // planes_of_row, rounds // max(8, together)))
    return math.ceil(rounds / number / together) * together


def table_by_tiles(
    x: np.ndarray, places: "list[tuple]", columns: int, planes: int, step: int = 128
) -> np.ndarray:
    """The sums, in the order that is defined: by rounds in each part, then parts by halves."""
    rounds = math.ceil(math.ceil(x.size / (planes * 1024)) / (columns // (planes * 1024)))
    length = parts(rounds, columns // 1024, step)
    sums = []
    for part in range(math.ceil(rounds / length)):
        sums.append(np.zeros((len(places), columns), x.dtype))
        for row, (column, sign, order) in enumerate(places):
            # Elements of one round have columns of their own.
            for i in np.flatnonzero(order // length == part):
                sums[-1][row, column[i]] += x[i] if sign[i] > 0 else -x[i]
    while len(sums) > 1:
        half = len(sums) // 2
        added = [a + b for a, b in zip(sums[:half], sums[len(sums) - half :], strict=True)]
        sums = added + sums[half : len(sums) - half]
    return sums[0]


def table(x: np.ndarray, places: "list[tuple]", columns: int) -> np.ndarray:
    """The sums, one by one, and exact if int64."""
    result = np.zeros((len(places), columns), x.dtype)
    for sums, (column, sign, *_) in zip(result, places, strict=True):
        for i in range(x.size):
            sums[column[i]] += x[i] if sign[i] > 0 else -x[i]
    return result


def estimates(sketch: np.ndarray, places: "list[tuple]") -> np.ndarray:
    """The estimate of every row for every coordinate, [rows, size]."""
    rows = [np.where(s > 0, t[c], -t[c]) for t, (c, s, *_) in zip(sketch, places, strict=True)]
    return np.stack(rows)


def median(values: np.ndarray) -> np.ndarray:
    """Midway of the middle two of each column, or its middle one; rounded down for integers."""
    ordered = np.sort(values, axis=0)
    rows = len(values)
    if rows % 2:
        return ordered[rows // 2]
    low, high = ordered[rows // 2 - 1], ordered[rows // 2]
    if np.issubdtype(values.dtype, np.integer):
        return ((low.astype(np.int64) + high) // 2).astype(values.dtype)
    return (low + high) / values.dtype.type(2)
