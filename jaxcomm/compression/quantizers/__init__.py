"""Quantizers: codecs that send fewer bits per coordinate."""

from jaxcomm.compression.quantizers._adaptive_levels import adaptive_levels
from jaxcomm.compression.quantizers._cast import block_float, cast, scaled_cast
from jaxcomm.compression.quantizers._dither import dither
from jaxcomm.compression.quantizers._microscaling import microscaling
from jaxcomm.compression.quantizers._min_max import min_max_dither
from jaxcomm.compression.quantizers._natural import e3m0, exponential_dither, natural
from jaxcomm.compression.quantizers._signs import fixed_threshold, one_bit, scaled_signs, signs
from jaxcomm.compression.quantizers._sparse_dither import sparse_dither, ternary

__all__ = [
    "adaptive_levels",
    "block_float",
    "cast",
    "dither",
    "e3m0",
    "exponential_dither",
    "fixed_threshold",
    "microscaling",
    "min_max_dither",
    "natural",
    "sparse_dither",
    "one_bit",
    "scaled_cast",
    "scaled_signs",
    "signs",
    "ternary",
]
