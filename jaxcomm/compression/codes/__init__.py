"""Variable-length codes: wrappers of a codec of integers, which send these in fewer bits."""

from jaxcomm.compression.codes._elias import elias
from jaxcomm.compression.codes._golomb_rice import golomb_rice
from jaxcomm.compression.codes._rans import Counts, rans
from jaxcomm.compression.codes._room import measured_room
from jaxcomm.compression.codes._variable_length import VariableLengthPayload

__all__ = [
    "Counts",
    "VariableLengthPayload",
    "elias",
    "golomb_rice",
    "measured_room",
    "rans",
]
