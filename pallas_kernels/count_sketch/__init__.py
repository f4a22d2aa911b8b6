"""Count-sketch of an array, and estimates of the coordinates from it."""

from pallas_kernels.count_sketch.api import decode, encode, round_columns
from pallas_kernels.count_sketch.elements import locations
from pallas_kernels.count_sketch.reference import ESTIMATES

__all__ = ["ESTIMATES", "decode", "encode", "locations", "round_columns"]
