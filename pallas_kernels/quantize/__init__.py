"""Global-scale stochastic rounding to integer fields, and back."""

from pallas_kernels.quantize.api import dequantize, quantize

__all__ = ["dequantize", "quantize"]
