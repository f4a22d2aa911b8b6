"""Variable-length codes: wrappers of a codec of integers, which send these in fewer bits."""

from jaxcomm.compression.codes._elias import elias
from jaxcomm.compression.codes._golomb_rice import golomb_rice
from jaxcomm.compression.codes._rans import rans
from jaxcomm.compression.codes._rows import measured_capacity

__all__ = ["elias", "golomb_rice", "measured_capacity", "rans"]
