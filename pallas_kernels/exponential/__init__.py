"""Stochastic rounding to powers of two, one byte each: a sign and an exponent."""

from pallas_kernels.exponential.api import add, decode, encode

__all__ = ["add", "decode", "encode"]
