"""Fewer bits a coordinate."""

from jaxcomm.compression.quantizers._cast import CastPayload, cast, scaled_cast
from jaxcomm.compression.quantizers._dither import (
    DitherPayload,
    dither,
    round_to_levels,
    variance_constant,
)
from jaxcomm.compression.quantizers._exponential import (
    ExponentialPayload,
    add_codes,
    exponential_dither,
    round_to_powers,
)
from jaxcomm.compression.quantizers._nonzeros import NonzerosPayload, nonzeros

__all__ = [
    "CastPayload",
    "DitherPayload",
    "ExponentialPayload",
    "NonzerosPayload",
    "add_codes",
    "cast",
    "dither",
    "exponential_dither",
    "nonzeros",
    "round_to_levels",
    "round_to_powers",
    "scaled_cast",
    "variance_constant",
]
