"""Blocks of 8-bit numbers that share a power of two: the MX formats, and larger blocks."""

from pallas_kernels.block_float.api import decode, encode

__all__ = ["decode", "encode"]
