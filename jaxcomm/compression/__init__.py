"""Codecs of one array. A codec names no mesh axis."""

from jaxcomm.compression import (
    codes,
    feedback,
    low_rank,
    quantizers,
    regularizers,
    sketches,
    sparsifiers,
)
from jaxcomm.compression._blockwise import blockwise
from jaxcomm.compression._chain import ChainPayload, chain
from jaxcomm.compression._compressed_memory import CompressedArray, compressed_memory
from jaxcomm.compression._cosine import cosine
from jaxcomm.compression._reserved import ReservedPayload, reserved
from jaxcomm.compression._rotated import rotated
from jaxcomm.compression._scaled import scaled
from jaxcomm.compression.quantizers import block_float

__all__ = [
    "ChainPayload",
    "CompressedArray",
    "ReservedPayload",
    "block_float",
    "blockwise",
    "codes",
    "chain",
    "compressed_memory",
    "cosine",
    "feedback",
    "low_rank",
    "quantizers",
    "regularizers",
    "reserved",
    "rotated",
    "scaled",
    "sketches",
    "sparsifiers",
]
