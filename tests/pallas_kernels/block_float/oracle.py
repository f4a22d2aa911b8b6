"""NumPy, written from the formulas: scales by logarithms of exact floats, casts by `ml_dtypes`."""

import ml_dtypes
import numpy as np

from tests.pallas_kernels.hash_oracle import words

DTYPES = {
    "int8": (np.int8, 127.0),
    "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, 448.0),
    "float8_e5m2": (ml_dtypes.float8_e5m2, 57344.0),
}


def _blocks(x: np.ndarray, block_size: int) -> np.ndarray:
    flat = x.astype(np.float64).ravel()
    flat = np.where(np.abs(flat) < 2.0**-126, 0, flat)
    return np.pad(flat, (0, -flat.size % block_size)).reshape(-1, block_size)


def scales_of(blocks: np.ndarray, largest: float) -> np.ndarray:
    """The smallest k of at least -126 for which no number of a block exceeds largest 2^k."""
    scales = np.full(len(blocks), -126)
    for index, block in enumerate(blocks):
        while np.isfinite(block).all() and np.abs(block).max() > largest * 2.0 ** scales[index]:
            scales[index] += 1
    return scales


def encode(
    x: np.ndarray, seeds: np.ndarray | None, dtype: str, block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Elements of the shape of x, and biased exponents."""
    element, largest = DTYPES[dtype]
    blocks = _blocks(x, block_size)
    scales = scales_of(blocks, largest)
    finite = np.isfinite(blocks).all(axis=1)
    y = np.where(finite[:, None], blocks, 0) / 2.0 ** scales[:, None]
    if seeds is None:
        rounded = np.rint(y) if dtype == "int8" else y
    else:
        rounded = _stochastic(y, seeds, element)
    elements = rounded.astype(element).ravel()[: x.size].reshape(x.shape)
    return elements, np.where(finite, scales + 127, 255).astype(np.uint8)


def _stochastic(y: np.ndarray, seeds: np.ndarray, element: type) -> np.ndarray:
    """Down to a multiple of the step, and up with the probability of the rest."""
    noise = words(y.size, seeds).reshape(y.shape).astype(np.int64) % 2**24
    if element is np.int8:
        return (np.trunc(y * 2.0**24).astype(np.int64) + noise) // 2**24
    info, magnitude = ml_dtypes.finfo(element), np.abs(y)
    # What has no leading digit is in fixed point, to 23 digits.
    unit = 2.0 ** (info.minexp - 23)
    magnitude = np.where(magnitude < 2.0**info.minexp, np.rint(magnitude / unit) * unit, magnitude)
    exponent = np.floor(np.log2(np.maximum(magnitude, 2.0**-200)))
    step = 2.0 ** (np.maximum(exponent, info.minexp) - info.nmant)
    fixed = (magnitude / step * 2.0**24).astype(np.int64)
    return np.copysign((fixed + noise) // 2**24 * step, y)


def decode(elements: np.ndarray, exponents: np.ndarray, block_size: int) -> np.ndarray:
    """float64 of the shape of the elements."""
    scales = np.where(exponents == 255, np.nan, 2.0 ** (exponents.astype(np.float64) - 127))
    each = np.repeat(scales, block_size)[: elements.size].reshape(elements.shape)
    largest = np.finfo(np.float32).max.astype(np.float64)
    return np.clip(elements.astype(np.float64) * each, -largest, largest)
