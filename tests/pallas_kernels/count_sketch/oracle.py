"""Count-sketches from the formulas, in NumPy and Python integers; shares nothing with ours."""

import numpy as np

WORD = 2**32


def mix(h: int) -> int:
    """lowbias32."""
    h = ((h ^ (h >> 16)) * 0x7FEB352D) % WORD
    h = ((h ^ (h >> 15)) * 0x846CA68B) % WORD
    return h ^ (h >> 16)


def word(position: int, seeds: tuple[int, int]) -> int:
    """The random word of a position."""
    return mix((position * (2 * seeds[0] + 1) + seeds[1]) % WORD)


def by_elements(size: int, seeds: tuple[int, int], rows: int, columns: int) -> "list[tuple]":
    """Column and sign of every element in each row, by a hash of each."""
    places = []
    for row in range(rows):
        own = word(2 * row, seeds), word(2 * row + 1, seeds)
        words = [word(i, own) for i in range(size)]
        places.append(([w * columns // WORD for w in words], [1 - 2 * (w % 2) for w in words]))
    return [(np.array(column), np.array(sign)) for column, sign in places]


def by_tiles(
    size: int, seeds: tuple[int, int], rows: int, columns: int, planes: int
) -> "list[tuple]":
    """Column, sign, and place of its tile, of every element in each row, by tiles."""
    length = planes * 1024
    slots = columns // length
    tiles = -(-size // length)
    places = 1
    while places < tiles:
        places *= 2
    runs = [places // slots + (slot < places % slots) for slot in range(slots)]
    slot_of_place = np.repeat(np.arange(slots), runs)
    result = []
    for row in range(rows):
        a, b, *rest = (word(8 * row + i, seeds) for i in range(6))
        a |= 1
        column, sign, order = (np.zeros(size, np.int64) for _ in range(3))
        for element in range(size):
            tile, inside = divmod(element, length)
            plane, sublane, lane = inside // 1024, inside // 128 % 8, inside % 128
            place = (a * tile + b) % places
            roll = word(tile, (rest[0], rest[1]))
            to_plane = (plane + roll % planes) % planes
            to_sublane = (sublane + (roll >> 5)) % 8
            to_lane = (lane + (roll >> 8)) % 128
            to = (to_plane * 8 + to_sublane) * 128 + to_lane
            column[element] = slot_of_place[place] * length + to
            bits = word(element // 32768 * 1024 + element % 1024, (rest[2], rest[3]))
            sign[element] = 1 - 2 * (bits >> (element // 1024 % 32) & 1)
            order[element] = place
        result.append((column, sign, order))
    return result


def table(x: np.ndarray, places: "list[tuple]", columns: int) -> np.ndarray:
    """The sums, one by one; in the order of the places where there are such, and exact if int64."""
    result = np.zeros((len(places), columns), x.dtype)
    for sums, (column, sign, *order) in zip(result, places, strict=True):
        for i in np.argsort(order[0], kind="stable") if order else range(x.size):
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
