"""Codecs of one array. A codec names no mesh axis."""

from jaxcomm.compression._blockwise import blockwise
from jaxcomm.compression._chain import chain, reserved
from jaxcomm.compression._compressed_memory import compressed_memory
from jaxcomm.compression._scaled import scaled
from jaxcomm.compression._transforms import cosine, rotated
from jaxcomm.compression._weight_delta import WeightReceiver, WeightSender

__all__ = [
    "WeightReceiver",
    "WeightSender",
    "blockwise",
    "chain",
    "compressed_memory",
    "cosine",
    "reserved",
    "rotated",
    "scaled",
]
