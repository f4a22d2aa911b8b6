"""Narrow fields in words of 32 bits."""

from pallas_kernels.pack.api import bits_for_sum, pack, unpack

__all__ = ["bits_for_sum", "pack", "unpack"]
