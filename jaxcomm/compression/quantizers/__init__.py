"""Quantizers: codecs that send fewer bits per coordinate."""

from jaxcomm.compression.quantizers._adaptive_levels import (
    AdaptiveLevelsPayload,
    Levels,
    adaptive_levels,
)
from jaxcomm.compression.quantizers._block_float import BlockFloatPayload, block_float
from jaxcomm.compression.quantizers._cast import CastPayload, cast, scaled_cast
from jaxcomm.compression.quantizers._dither import (
    DitherPayload,
    dither,
    round_to_levels,
    variance_constant,
)
from jaxcomm.compression.quantizers._e3m0 import E3M0Payload, e3m0
from jaxcomm.compression.quantizers._exponential import (
    ExponentialPayload,
    exponential_dither,
)
from jaxcomm.compression.quantizers._fixed_threshold import FixedThresholdPayload, fixed_threshold
from jaxcomm.compression.quantizers._min_max import MinMax, MinMaxPayload, min_max_dither
from jaxcomm.compression.quantizers._natural import NaturalPayload, natural
from jaxcomm.compression.quantizers._one_bit import ClassMeans, OneBitPayload, one_bit
from jaxcomm.compression.quantizers._signs import MeanAbs, SignsPayload, scaled_signs, signs
from jaxcomm.compression.quantizers._sparse_dither import SparseDitherPayload, sparse_dither
from jaxcomm.compression.quantizers._terngrad import ternary

__all__ = [
    "AdaptiveLevelsPayload",
    "BlockFloatPayload",
    "CastPayload",
    "ClassMeans",
    "DitherPayload",
    "E3M0Payload",
    "ExponentialPayload",
    "FixedThresholdPayload",
    "Levels",
    "MeanAbs",
    "MinMax",
    "MinMaxPayload",
    "NaturalPayload",
    "SparseDitherPayload",
    "OneBitPayload",
    "SignsPayload",
    "adaptive_levels",
    "block_float",
    "cast",
    "dither",
    "e3m0",
    "exponential_dither",
    "fixed_threshold",
    "min_max_dither",
    "natural",
    "sparse_dither",
    "one_bit",
    "round_to_levels",
    "scaled_cast",
    "scaled_signs",
    "signs",
    "ternary",
    "variance_constant",
]
