"""Codecs of one array. A codec names no mesh axis."""

from jaxcomm.compression import feedback, quantizers, sketches, sparsifiers
from jaxcomm.compression._blockwise import blockwise
from jaxcomm.compression._rotated import rotated
from jaxcomm.compression._scaled import scaled

__all__ = [
    "blockwise",
    "feedback",
    "quantizers",
    "rotated",
    "scaled",
    "sketches",
    "sparsifiers",
]
