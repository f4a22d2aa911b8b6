"""`encode` and `decode` by tiles as Pallas kernels for TPU."""

from pallas_kernels.count_sketch.tpu_decode import decode
from pallas_kernels.count_sketch.tpu_encode import encode
from pallas_kernels.count_sketch.tpu_tiles import Config

__all__ = ["Config", "decode", "encode"]
