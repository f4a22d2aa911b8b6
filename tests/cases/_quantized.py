"""Rows of the exact means and of quantizers."""

from collections.abc import Callable

import numpy as np

from tests.cases._case import (
    NO_MAGNITUDE,
    Case,
    Sizes,
    all_reduce,
    each_alone,
    root,
    row,
    row_size,
    twice,
    zero,
)


def width_of(levels: int, workers: int) -> int:
    """Bits of the cheapest field: 2 s n + 1 values must fit, and 32 // bits fields share a word."""
    fitting = [bits for bits in (*range(2, 17), 32) if 2 * levels * workers + 1 <= 2**bits]
    return max(fitting, key=lambda bits: (32 // bits, bits))


def _theta(levels: Callable[[int], int]) -> Callable[[int, int], float]:
    return lambda d, n: min(d / levels(n) ** 2, (d / n) ** 0.5 / levels(n))


def _theta_own_norm(levels: int) -> Callable[[int, int], float]:
    return lambda d, n: min(d / levels**2, d**0.5 / levels) / n


def _hlo(width: int) -> str:
    """The dtype in which fields of `width` bits travel."""
    return {8: "int8", 32: "int32"}.get(width, "uint32")


def _padded(size: int, width: int) -> int:
    """Bytes of one unit's codes: fields of other than 8 bits fill whole 32-bit words."""
    return size if width == 8 else 4 * -(-size // (32 // width))


def _global_case(
    name: str,
    own_levels: Callable[[int], int],
    width: Callable[[int], int] | None = None,
    /,
    *,
    units: Callable[[Sizes], Sizes] = lambda sizes: [sum(sizes)],
    norms: Callable[[Sizes], int] = len,
    statistics: int = 1,
    peak: Callable[[int], float] = lambda d: 1.0,
) -> Case:
    """A row of Global-QSGD, claims written out from its options."""
    width = width or (lambda n: width_of(own_levels(n), n))

    def sent(sizes: Sizes, n: int) -> float:
        codes = sum(_padded(size, width(n)) for size in units(sizes))
        return all_reduce(codes + 4 * statistics * norms(units(sizes)) + 4, n)

    return row(
        name,
        bytes=sent,
        dtypes=lambda n: {_hlo(width(n))},
        variance=_theta(own_levels),
        resolution=lambda n, d: peak(n * d) / own_levels(n),
        integer_sum=True,
    )


def _gathered_case(
    name: str,
    own_levels: int,
    width: int,
    /,
    *,
    units: Callable[[Sizes], Sizes] = lambda sizes: [sum(sizes)],
    statistics: int = 1,
    peak: Callable[[int], float] = lambda d: 1.0,
) -> Case:
    """A row of QSGD, claims written out from its options."""

    def sent(sizes: Sizes, n: int) -> float:
        codes = sum(_padded(size, width) for size in units(sizes))
        return (n - 1) * (codes + 4 * statistics * len(units(sizes)) + 4)

    return row(
        name,
        bytes=sent,
        dtypes=lambda n: {"uint8" if width == 8 else "uint32"},
        variance=_theta_own_norm(own_levels),
        resolution=lambda n, d: peak(d) / own_levels,
    )


def most_levels(bits: int) -> Callable[[int], int]:
    """The most levels whose sum over n workers fits in signed `bits`; float32 holds 24 of them."""
    return lambda n: min((2**bits - 1) // (2 * n), 2**24 - 1)


def _in_buckets_of_8(sizes: Sizes) -> Sizes:
    """First-come buckets of at most 8 coordinates; larger leaves are separate."""
    buckets: Sizes = []
    for size in sizes:
        if buckets and buckets[-1] + size <= 8:
            buckets[-1] += size
        else:
            buckets.append(size)
    return buckets


QUANTIZED = [
    row(
        "mean",
        bytes=lambda sizes, n: all_reduce(4 * sum(sizes), n),
        dtypes="float32",
        variance=zero,
        resolution=zero,
        random=False,
        nonfinite="coordinate",
    ),
    row(
        "ring_mean",
        bytes=lambda sizes, n: 2 * (n - 1) * 4 * row_size(sum(sizes), n),
        dtypes="float32",
        variance=zero,
        resolution=zero,
        random=False,
        nonfinite="coordinate",
    ),
    row(
        "majority_vote",
        bytes=lambda sizes, n: 2 * (n - 1) * 4 * row_size(sum(sizes), 32 * n) + all_reduce(4, n),
        integer_sum=True,
        random=False,
        weighted=False,
        result=lambda updates: np.sign(np.sign(updates).sum(axis=1)),
        zeros_drawn=True,
        alien=NO_MAGNITUDE,
    ),
    _global_case("global_qsgd", lambda n: 15),
    _global_case("global_qsgd_8_bits", most_levels(8), lambda n: 8),
    _global_case("global_qsgd_l2", lambda n: 15, statistics=3, peak=root),
    _global_case("global_qsgd_leaf", lambda n: 15, units=each_alone),
    _global_case("global_qsgd_buckets", lambda n: 15, units=_in_buckets_of_8),
    _gathered_case("qsgd", 127, 8),
    row(
        "global_qsgd_exponential",
        bytes=lambda sizes, n: 2 * (n - 1) * row_size(sum(sizes), n) + all_reduce(8, n),
        dtypes="uint8",
        # Each of 1 + log2(n) roundings multiplies the second moment by at most 9/8.
        variance=lambda d, n: (9 / 8) ** (1 + (n - 1).bit_length()) - 1,
        resolution=lambda n, d: 1 + 2 ** (n - 1).bit_length() / n,
        integer_sum=True,
        rerounds=True,
    ),
    row(
        "two_stage_4_bits",
        # Blocks of 8 coordinates: one word of 4-bit fields and one float32 norm each.
        bytes=lambda sizes, n: 2 * (n - 1) * 8 * row_size(sum(sizes), 8 * n) + all_reduce(4, n),
        variance=lambda d, n: twice(min(8 / 7**2, 8**0.5 / 7), n),
        resolution=lambda n, d: 1 / 7 + (1 + 1 / 7) / 7,
    ),
    row(
        "mean_bfloat16",
        bytes=lambda sizes, n: 2 * (n - 1) * 2 * row_size(sum(sizes), n) + all_reduce(4, n),
        dtypes="uint16",
        resolution=lambda n, d: 2 * 2.0**-8,
        random=False,
    ),
    row(
        "sparse_global_qsgd",
        # 16-bit indices, 4-bit codes, a count; the norm's three numbers and a flag are reduced.
        bytes=lambda sizes, n: (n - 1) * (2048 * 2 + 2048 // 2 + 4) + all_reduce(16, n),
        dtypes="uint16",
        variance=_theta(lambda n: 4),
        resolution=lambda n, d: root(n * d) / 4,
    ),
    _global_case("global_qsgd_3_levels", lambda n: 3),
    _global_case("global_qsgd_10_bits", most_levels(10), lambda n: 10),
    _global_case("global_qsgd_16_bits", most_levels(16), lambda n: 16),
    _global_case("global_qsgd_32_bits", most_levels(32), lambda n: 32),
    _global_case(
        "global_qsgd_tree",
        lambda n: 15,
        units=_in_buckets_of_8,
        norms=lambda units: 1,
    ),
    _gathered_case("qsgd_4_bits", 7, 4),
    _gathered_case("qsgd_16_bits", 32767, 16),
    _gathered_case("qsgd_l2", 127, 8, statistics=3, peak=root),
    _gathered_case("qsgd_leaf", 127, 8, units=each_alone),
    row(
        "global_qsgd_exponential_two_stage",
        bytes=lambda sizes, n: 2 * (n - 1) * (row_size(sum(sizes), n) + 4) + all_reduce(4, n),
        dtypes="uint8",
        variance=lambda d, n: twice(1 / 8, n),
        resolution=lambda n, d: 2.0,
    ),
    row(
        "two_stage_8_bits",
        bytes=lambda sizes, n: 2 * (n - 1) * (row_size(sum(sizes), n) + 4) + all_reduce(4, n),
        dtypes="uint8",
        variance=lambda d, n: twice(min(row_size(d, n) / 127**2, row_size(d, n) ** 0.5 / 127), n),
        resolution=lambda n, d: 1 / 127 + (1 + 1 / 127) / 127,
    ),
    row(
        "mean_float8",
        bytes=lambda sizes, n: 2 * (n - 1) * 8 * row_size(sum(sizes), 4 * n) + all_reduce(4, n),
        dtypes="uint8",
        resolution=lambda n, d: 2.1 * 2.0**-4,
        random=False,
    ),
]
