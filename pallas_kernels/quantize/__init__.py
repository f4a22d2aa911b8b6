"""Stochastic rounding to integer fields with a global scale, and the inverse."""

from pallas_kernels.quantize.api import dequantize, quantize

__all__ = ["dequantize", "quantize"]
