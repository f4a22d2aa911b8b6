"""Linear sketches, which can be summed over workers."""

from jaxcomm.compression.sketches._count_sketch import count_sketch
from jaxcomm.compression.sketches._s2_sketch import s2_codes, s2_sketch

__all__ = ["count_sketch", "s2_codes", "s2_sketch"]
