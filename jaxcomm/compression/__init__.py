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
from jaxcomm.compression._compressed_memory import CompressedArray, compressed_memory
from jaxcomm.compression._rotated import rotated
from jaxcomm.compression._scaled import scaled

__all__ = [
    "CompressedArray",
    "blockwise",
    "codes",
    "compressed_memory",
    "feedback",
    "low_rank",
    "quantizers",
    "regularizers",
    "rotated",
    "scaled",
    "sketches",
    "sparsifiers",
]
