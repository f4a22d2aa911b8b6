"""`encode` and `decode` by tiles as Pallas kernels for TPU."""

from pallas_kernels.count_sketch.tpu_decode import decode
from pallas_kernels.count_sketch.tpu_encode import encode

__all__ = ["decode", "encode"]
