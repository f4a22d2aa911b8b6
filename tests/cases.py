"""The table of cases: every method with what it claims. A new method is one row.

Claims are written here from the papers and by hand, never from the code they are held against.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import optax

import jaxcomm
from jaxcomm.compression.quantizers import dither

Sizes = list[int]  # coordinates of each leaf, in the order of the tree


class Case(NamedTuple):
    """A method, how to build it, and its claims.

    Attributes:
      name: Shown in test ids.
      make: `(axis_name, seed) -> transformation`, cached so that tests share compiled programs.
      bytes: `(sizes, workers) -> bytes` that a worker sends for one update.
      dtypes: `workers -> dtypes` of payloads in the compiled program, as HLO names them.
      unbiased: The expectation of the result is the mean.
      variance: `(coordinates of the tree, workers) -> theta`, with
        `E|G - mean|^2 <= theta / n * sum |x_i|^2`; `None` without a claim.
      resolution: `(workers, coordinates) -> r`: no coordinate of the result is farther from the
        mean than `r` times the largest magnitude on any worker. 0 claims exactness to float32
        rounding.
      integer_sum: Workers' contributions are added as integers: all modes agree bit for bit.
      random: Rounds at random.
      codec: The codec, where the method is one aggregator of one codec.
    """

    name: str
    make: Callable[..., optax.GradientTransformationExtraArgs]
    bytes: Callable[[Sizes, int], float]
    dtypes: Callable[[int], set[str]]
    unbiased: bool
    variance: Callable[[int, int], float] | None
    resolution: Callable[[int, int], float]
    integer_sum: bool = False
    random: bool = True
    codec: jaxcomm.Codec | None = None

    def __repr__(self) -> str:
        return self.name


def _all_reduce(size_in_bytes: float, workers: int) -> float:
    return 2 * (workers - 1) / workers * size_in_bytes


def _width(levels: int, workers: int) -> int:
    """Bytes of a code: 2 s n + 1 values must fit."""
    return next(size for size in (1, 2, 4) if 2 * levels * workers + 1 <= 256**size)


def _theta(levels: Callable[[int], int]) -> Callable[[int, int], float]:
    return lambda d, n: min(d / levels(n) ** 2, (d / n) ** 0.5 / levels(n))


def _theta_own_norm(levels: int) -> Callable[[int, int], float]:
    return lambda d, n: min(d / levels**2, d**0.5 / levels) / n


_HLO = {1: "s8", 2: "u32", 4: "s32"}


def _padded(size: int, width: int) -> int:
    """Bytes of one unit's codes: 16-bit fields fill whole 32-bit words."""
    return -(-size * width // 4) * 4 if width == 2 else size * width


def _global_case(
    name: str,
    own_levels: Callable[[int], int],
    width: Callable[[int], int] | None = None,
    /,
    *,
    units: Callable[[Sizes], Sizes] = lambda sizes: [sum(sizes)],
    statistics: int = 1,
    peak: Callable[[int], float] = lambda d: 1.0,
    **options: object,
) -> Case:
    """A row of Global-QSGD, claims written out from its options."""
    width = width or (lambda n: _width(own_levels(n), n))

    def sent(sizes: Sizes, n: int) -> float:
        codes = sum(_padded(size, width(n)) for size in units(sizes))
        return _all_reduce(codes + 4 * statistics * len(units(sizes)) + 4, n)

    codec_options = {k: v for k, v in options.items() if k in ("levels", "bits", "norm")}
    return Case(
        name,
        cache(
            lambda axis_name="data", seed=0: jaxcomm.global_qsgd(axis_name, seed=seed, **options)
        ),
        bytes=sent,
        dtypes=lambda n: {_HLO[width(n)]},
        unbiased=True,
        variance=_theta(own_levels),
        resolution=lambda n, d: peak(n * d) / own_levels(n),
        integer_sum=True,
        codec=dither(**codec_options),
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
    **options: object,
) -> Case:
    """A row of QSGD, claims written out from its options."""

    def sent(sizes: Sizes, n: int) -> float:
        codes = sum(_padded(size, width) for size in units(sizes))
        return (n - 1) * (codes + 4 * statistics * len(units(sizes)) + 4)

    codec_options = {"bits": 8} | {k: v for k, v in options.items() if k in ("bits", "norm")}
    return Case(
        name,
        cache(lambda axis_name="data", seed=0: jaxcomm.qsgd(axis_name, seed=seed, **options)),
        bytes=sent,
        dtypes=lambda n: {_HLO[width]},
        unbiased=True,
        variance=_theta_own_norm(own_levels),
        resolution=lambda n, d: peak(d) / own_levels,
        codec=dither(**codec_options),
    )


def _most(bits: int) -> Callable[[int], int]:
    """The most levels whose sum over n workers fits in signed `bits`; float32 holds 24 of them."""
    return lambda n: min((2 ** (bits - 1) - 1) // n, 2**24 - 1)


def _sqrt(d: int) -> float:
    """The l2 norm of d coordinates over the largest of them, at most."""
    return d**0.5


def _apart(sizes: Sizes) -> Sizes:
    return sizes


def _in_buckets_of_8(sizes: Sizes) -> Sizes:
    """First-come buckets of at most 8 coordinates; larger leaves stand alone."""
    buckets: Sizes = []
    for size in sizes:
        if buckets and buckets[-1] + size <= 8:
            buckets[-1] += size
        else:
            buckets.append(size)
    return buckets


CASES = [
    Case(
        "mean",
        cache(lambda axis_name="data", seed=0: jaxcomm.mean(axis_name)),
        bytes=lambda sizes, n: _all_reduce(4 * sum(sizes), n),
        dtypes=lambda n: {"f32"},
        unbiased=True,
        variance=lambda d, n: 0.0,
        resolution=lambda n, d: 0.0,
        random=False,
    ),
    _global_case("global_qsgd", lambda n: 15),
    _global_case("global_qsgd_3_levels", lambda n: 3, levels=3),
    _global_case("global_qsgd_8_bits", _most(8), lambda n: 1, bits=8),
    _global_case("global_qsgd_16_bits", _most(16), lambda n: 2, bits=16),
    _global_case("global_qsgd_32_bits", _most(32), lambda n: 4, bits=32),
    _global_case("global_qsgd_l2", lambda n: 15, statistics=3, peak=_sqrt, norm="l2"),
    _global_case("global_qsgd_leaf", lambda n: 15, units=_apart, scope="leaf"),
    _global_case(
        "global_qsgd_tree", lambda n: 15, units=_in_buckets_of_8, scope="tree", bucket_bytes=32
    ),
    _global_case("global_qsgd_buckets", lambda n: 15, units=_in_buckets_of_8, bucket_bytes=35),
    _gathered_case("qsgd", 127, 1),
    _gathered_case("qsgd_16_bits", 32767, 2, bits=16),
    _gathered_case("qsgd_l2", 127, 1, statistics=3, peak=_sqrt, norm="l2"),
    _gathered_case("qsgd_leaf", 127, 1, units=_apart, scope="leaf"),
]
