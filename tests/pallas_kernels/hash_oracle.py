"""The hash that draws all noise, in Python integers or NumPy's uint64; shares no code with ours."""

from typing import Any

import numpy as np

WORD = 2**32


def mix(h: Any) -> Any:
    """lowbias32."""
    h = (h ^ h >> 16) * 0x7FEB352D % WORD
    h = (h ^ h >> 15) * 0x846CA68B % WORD
    return h ^ h >> 16


def word(position: Any, seeds: Any) -> Any:
    """m((2 first seed + 1) j + second seed), in integers modulo 2**32."""
    first, second = map(int, seeds)
    return mix((position * ((2 * first + 1) % WORD) + second) % WORD)


def words(size: int, seeds: Any) -> np.ndarray:
    """Those of the positions 0, 1, ..., uint64[size]."""
    found: np.ndarray = word(np.arange(size, dtype=np.uint64), seeds)
    return found
