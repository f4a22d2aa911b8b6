"""Blocks of 8-bit numbers that share a power of two: the MX formats, and larger blocks."""

from pallas_kernels.block_float.api import BLOCK_SIZES, decode, encode
from pallas_kernels.block_float.formats import FORMATS

__all__ = ["BLOCK_SIZES", "FORMATS", "decode", "encode"]
