"""The table of cases: every method with what it claims. A new method is one row.

Claims are written here from the papers and by hand, never from the code they are held against.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm.compression import blockwise
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither, exponential_dither
from jaxcomm.compression.sparsifiers import top_k

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
        rounding; `None` for what is no mean.
      integer_sum: Workers' contributions are added as integers: all modes agree bit for bit.
      random: Rounds at random.
      codec: The codec, where the method is one aggregator of one codec.
      rerounds: Sums are rounded again on the way, to few values.
      weighted: Takes `update(..., weight=)`.
      variant: Differs from another row in its numbers or its codec only: held to its claims in
        every run, to the other laws in the slow one.
      compressor: The codec without feedback, which is held to the next two.
      contraction: `coordinates -> delta`, with `E|C(x) - x|^2 <= (1 - delta) |x|^2`.
      moment: `x -> E|Q(x) - x|^2`, exactly, of one worker's float64 vector.
      feedback: What `codec` sends and keeps is what it was given.
      common_coins: Workers draw alike.
    """

    name: str
    make: Callable[..., optax.GradientTransformationExtraArgs]
    bytes: Callable[[Sizes, int], float]
    dtypes: Callable[[int], set[str]]
    unbiased: bool
    variance: Callable[[int, int], float] | None
    resolution: Callable[[int, int], float] | None = None
    integer_sum: bool = False
    random: bool = True
    codec: jaxcomm.Codec | None = None
    rerounds: bool = False
    weighted: bool = True
    variant: bool = False
    compressor: jaxcomm.Codec | None = None
    contraction: Callable[[int], float] | None = None
    moment: Callable[[np.ndarray], float] | None = None
    feedback: bool = False
    common_coins: bool = False

    def __repr__(self) -> str:
        return self.name


def _all_reduce(size_in_bytes: float, workers: int) -> float:
    return 2 * (workers - 1) / workers * size_in_bytes


def _rows(size: int, workers: int) -> int:
    """Of `size` elements, what each of n workers holds: the last row is filled up."""
    return -(-size // workers)


def _width(levels: int, workers: int) -> int:
    """Bits of the cheapest field: 2 s n + 1 values must fit, and 32 // bits fields share a word."""
    fitting = [bits for bits in (*range(2, 17), 32) if 2 * levels * workers + 1 <= 2**bits]
    return max(fitting, key=lambda bits: (32 // bits, bits))


def _theta(levels: Callable[[int], int]) -> Callable[[int, int], float]:
    return lambda d, n: min(d / levels(n) ** 2, (d / n) ** 0.5 / levels(n))


def _theta_own_norm(levels: int) -> Callable[[int, int], float]:
    return lambda d, n: min(d / levels**2, d**0.5 / levels) / n


def _hlo(width: int) -> str:
    """The dtype in which fields of `width` bits travel."""
    return {8: "s8", 32: "s32"}.get(width, "u32")


def _padded(size: int, width: int) -> int:
    """Bytes of one unit's codes: fields other than of 8 bits fill whole 32-bit words."""
    return size if width == 8 else 4 * -(-size // (32 // width))


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
        dtypes=lambda n: {_hlo(width(n))},
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
        dtypes=lambda n: {_hlo(width)},
        unbiased=True,
        variance=_theta_own_norm(own_levels),
        resolution=lambda n, d: peak(d) / own_levels,
        codec=dither(**codec_options),
    )


def _most(bits: int) -> Callable[[int], int]:
    """The most levels whose sum over n workers fits in signed `bits`; float32 holds 24 of them."""
    return lambda n: min((2**bits - 1) // (2 * n), 2**24 - 1)


def _sqrt(d: int) -> float:
    """The l2 norm of d coordinates over the largest of them, at most."""
    return d**0.5


def _twice(omega: float, n: int) -> float:
    """theta of two roundings of relative variance omega, of each update and of their mean."""
    return omega / n + omega * (1 + omega / n)


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


def _quarter(size: int) -> int:
    return max(round(size / 4), 1)


def _words(bits: int) -> int:
    """Bytes of so many bits in whole words of 32."""
    return 4 * -(-bits // 32)


def _index_bits(count: int, size: int) -> int:
    """Of ascending indices below `size`: in fixed width, as Elias and Fano do, or a bitmap."""
    fixed = count * math.ceil(math.log2(max(size, 1)))
    elias_fano = [
        count * low + count + ((size - 1) >> low if count else 0)
        for low in range(size.bit_length())
    ]
    return min(fixed, size, *elias_fano)


def _index_bits_repeated(count: int, size: int) -> int:
    """The same where an index may come twice, which a bitmap cannot say."""
    fixed = count * math.ceil(math.log2(max(size, 1)))
    return min(fixed, *(count * low + count + ((size - 1) >> low) for low in range(30)))


def _top_quarter(size: int) -> int:
    return _words(_index_bits(_quarter(size), size)) + 4 * _quarter(size)


def _feedback_case(
    name: str,
    compressor: jaxcomm.Codec,
    /,
    *,
    bytes: Callable[[int], int],
    dtypes: set[str],
    contraction: Callable[[int], float] | None,
    statistics: int = 0,
    units: Callable[[Sizes], Sizes] = lambda sizes: [sum(sizes)],
    scope: str = "bucket",
    random: bool = False,
    moment: Callable[[np.ndarray], float] | None = None,
    variant: bool = True,
) -> Case:
    """A row of a biased codec under error feedback, gathered; `bytes` are those of one unit."""
    codec = error_feedback(compressor)
    return Case(
        name,
        cache(
            lambda axis_name="data", seed=0: jaxcomm.gathered_mean(
                axis_name, codec, scope=scope, seed=seed
            )
        ),
        bytes=lambda sizes, n: (
            (n - 1) * (sum(bytes(size) + 4 * statistics for size in units(sizes)) + 4)
        ),
        dtypes=lambda n: dtypes,
        unbiased=False,
        variance=None,
        random=random,
        codec=codec,
        variant=variant,
        compressor=compressor,
        contraction=contraction,
        moment=moment,
        feedback=True,
    )


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
    Case(
        "ring_mean",
        cache(lambda axis_name="data", seed=0: jaxcomm.ring_mean(axis_name)),
        bytes=lambda sizes, n: 2 * (n - 1) * 4 * _rows(sum(sizes), n),
        dtypes=lambda n: {"f32"},
        unbiased=True,
        variance=lambda d, n: 0.0,
        resolution=lambda n, d: 0.0,
        random=False,
    ),
    Case(
        "votes",
        cache(lambda axis_name="data", seed=0: jaxcomm.votes(axis_name)),
        bytes=lambda sizes, n: 2 * (n - 1) * 4 * _rows(sum(sizes), 32 * n) + _all_reduce(4, n),
        dtypes=lambda n: {"u32"},
        unbiased=False,
        variance=None,
        integer_sum=True,
        random=False,
        weighted=False,
    ),
    _global_case("global_qsgd", lambda n: 15),
    _global_case("global_qsgd_8_bits", _most(8), lambda n: 8, bits=8),
    _global_case("global_qsgd_l2", lambda n: 15, statistics=3, peak=_sqrt, norm="l2"),
    _global_case("global_qsgd_leaf", lambda n: 15, units=_apart, scope="leaf"),
    _global_case("global_qsgd_buckets", lambda n: 15, units=_in_buckets_of_8, bucket_bytes=35),
    _gathered_case("qsgd", 127, 8),
    Case(
        "global_qsgd_exponential",
        cache(
            lambda axis_name="data", seed=0: jaxcomm.global_qsgd(
                axis_name, dithering="exponential", seed=seed
            )
        ),
        bytes=lambda sizes, n: 2 * (n - 1) * _rows(sum(sizes), n) + _all_reduce(8, n),
        dtypes=lambda n: {"u8"},
        unbiased=True,
        # Each of 1 + log2(n) roundings multiplies the second moment by at most 9/8.
        variance=lambda d, n: (9 / 8) ** (1 + (n - 1).bit_length()) - 1,
        resolution=lambda n, d: 1 + 2 ** (n - 1).bit_length() / n,
        integer_sum=True,
        rerounds=True,
        codec=exponential_dither(),
    ),
    Case(
        "two_stage_4_bits",
        cache(
            lambda axis_name="data", seed=0: jaxcomm.two_stage_mean(
                axis_name, blockwise(dither(bits=4), 8), seed=seed
            )
        ),
        # Blocks of 8 coordinates: one word of 4-bit fields and one float32 norm each.
        bytes=lambda sizes, n: 2 * (n - 1) * 8 * _rows(sum(sizes), 8 * n) + _all_reduce(4, n),
        dtypes=lambda n: {"u8"},
        unbiased=True,
        variance=lambda d, n: _twice(min(8 / 7**2, 8**0.5 / 7), n),
        resolution=lambda n, d: 1 / 7 + (1 + 1 / 7) / 7,
    ),
    Case(
        "mean_bfloat16",
        cache(lambda axis_name="data", seed=0: jaxcomm.mean(axis_name, wire_dtype="bfloat16")),
        bytes=lambda sizes, n: 2 * (n - 1) * 2 * _rows(sum(sizes), n) + _all_reduce(4, n),
        dtypes=lambda n: {"u8"},
        unbiased=False,
        variance=None,
        resolution=lambda n, d: 2 * 2.0**-8,
        random=False,
    ),
    Case(
        "sparse_global_qsgd",
        cache(
            lambda axis_name="data", seed=0: jaxcomm.sparse_global_qsgd(
                axis_name, capacity=2048, levels=4, seed=seed
            )
        ),
        # 16-bit indices, 4-bit codes, a count; the norm's three numbers and a flag are agreed.
        bytes=lambda sizes, n: (n - 1) * (2048 * 2 + 2048 // 2 + 4) + _all_reduce(16, n),
        dtypes=lambda n: {"u16", "u32"},
        unbiased=True,
        variance=_theta(lambda n: 4),
        resolution=lambda n, d: _sqrt(n * d) / 4,
    ),
    _feedback_case(
        "top_k",
        top_k(ratio=0.25),
        bytes=_top_quarter,
        dtypes={"u32", "f32"},
        contraction=lambda d: _quarter(d) / d,
        variant=False,
    ),
    _feedback_case(
        "top_k_bfloat16",
        top_k(ratio=0.25, value_dtype="bfloat16"),
        bytes=lambda size: _words(_index_bits(_quarter(size), size)) + 2 * _quarter(size),
        dtypes={"u32", "u16"},
        contraction=lambda d: _quarter(d) / d * (1 - 2.0**-16),
    ),
    _feedback_case(
        "top_k_blocks",
        top_k(k=1, block_size=4),
        # A quarter of the coordinates, one of each four: two bits each say which.
        bytes=lambda size: _words(min(-(-size // 4) * 2, 4 * -(-size // 4))) + 4 * -(-size // 4),
        dtypes={"u32", "f32"},
        contraction=lambda d: 1 / min(d, 4),
    ),
    _feedback_case(
        "top_k_sampled",
        top_k(ratio=0.25, sample=0.5),
        # One index more, which names no coordinate; no bitmap, since it may come twice.
        bytes=lambda size: (
            _words(_index_bits_repeated(_quarter(size), size + 1)) + 4 * _quarter(size)
        ),
        dtypes={"u32", "f32"},
        contraction=lambda d: max(_quarter(d) // 2, 1) / d,
    ),
    Case(
        "top_k_two_stage",
        cache(
            lambda axis_name="data", seed=0: jaxcomm.two_stage_mean(
                axis_name, error_feedback(top_k(ratio=0.25)), seed=seed
            )
        ),
        bytes=lambda sizes, n: 2 * (n - 1) * _top_quarter(_rows(sum(sizes), n)) + _all_reduce(4, n),
        dtypes=lambda n: {"u8"},
        unbiased=False,
        variance=None,
        random=False,
    ),
    *(
        case._replace(variant=True)
        for case in [
            _global_case("global_qsgd_3_levels", lambda n: 3, levels=3),
            _global_case("global_qsgd_10_bits", _most(10), lambda n: 10, bits=10),
            _global_case("global_qsgd_16_bits", _most(16), lambda n: 16, bits=16),
            _global_case("global_qsgd_32_bits", _most(32), lambda n: 32, bits=32),
            _global_case(
                "global_qsgd_tree",
                lambda n: 15,
                units=_in_buckets_of_8,
                scope="tree",
                bucket_bytes=32,
            ),
            _gathered_case("qsgd_4_bits", 7, 4, bits=4),
            _gathered_case("qsgd_16_bits", 32767, 16, bits=16),
            _gathered_case("qsgd_l2", 127, 8, statistics=3, peak=_sqrt, norm="l2"),
            _gathered_case("qsgd_leaf", 127, 8, units=_apart, scope="leaf"),
            Case(
                "global_qsgd_exponential_two_stage",
                cache(
                    lambda axis_name="data", seed=0: jaxcomm.global_qsgd(
                        axis_name, dithering="exponential", reduce="two_stage", seed=seed
                    )
                ),
                bytes=lambda sizes, n: 2 * (n - 1) * (_rows(sum(sizes), n) + 4) + _all_reduce(4, n),
                dtypes=lambda n: {"u8"},
                unbiased=True,
                variance=lambda d, n: _twice(1 / 8, n),
                resolution=lambda n, d: 2.0,
            ),
            Case(
                "two_stage_8_bits",
                cache(
                    lambda axis_name="data", seed=0: jaxcomm.two_stage_mean(
                        axis_name, dither(bits=8), seed=seed
                    )
                ),
                bytes=lambda sizes, n: 2 * (n - 1) * (_rows(sum(sizes), n) + 4) + _all_reduce(4, n),
                dtypes=lambda n: {"u8"},
                unbiased=True,
                variance=lambda d, n: _twice(
                    min(_rows(d, n) / 127**2, _rows(d, n) ** 0.5 / 127), n
                ),
                resolution=lambda n, d: 1 / 127 + (1 + 1 / 127) / 127,
            ),
            Case(
                "mean_float8",
                cache(
                    lambda axis_name="data", seed=0: jaxcomm.mean(
                        axis_name, wire_dtype="float8_e4m3fn", block_size=4
                    )
                ),
                bytes=lambda sizes, n: (
                    2 * (n - 1) * 8 * _rows(sum(sizes), 4 * n) + _all_reduce(4, n)
                ),
                dtypes=lambda n: {"u8"},
                unbiased=False,
                variance=None,
                resolution=lambda n, d: 2.1 * 2.0**-4,
                random=False,
            ),
        ]
    ),
]


def rows(cases: list[Case]) -> list:
    """Rows for `pytest.mark.parametrize`, variants being left to the slow run."""
    return [pytest.param(c, marks=[pytest.mark.slow] if c.variant else []) for c in cases]


MEANS = [case for case in CASES if case.resolution]
WEIGHTED = [case for case in MEANS if case.weighted]
