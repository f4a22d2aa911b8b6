"""Fewer bits a coordinate."""

from jaxcomm.compression.quantizers._dither import (
    DitherPayload,
    dither,
    round_to_levels,
    variance_constant,
)

__all__ = ["DitherPayload", "dither", "round_to_levels", "variance_constant"]
