"""Sparsifiers: codecs that send fewer coordinates."""

from jaxcomm.compression.sparsifiers._ada_comp import ada_comp
from jaxcomm.compression.sparsifiers._adaptive_threshold import adaptive_threshold
from jaxcomm.compression.sparsifiers._block_coordinate import block_coordinate
from jaxcomm.compression.sparsifiers._coarse_top_k import coarse_top_k
from jaxcomm.compression.sparsifiers._nonzero import nonzero
from jaxcomm.compression.sparsifiers._nonzero_union import nonzero_union
from jaxcomm.compression.sparsifiers._random_k import random_k
from jaxcomm.compression.sparsifiers._sbc import sbc
from jaxcomm.compression.sparsifiers._stc import stc
from jaxcomm.compression.sparsifiers._threshold import threshold
from jaxcomm.compression.sparsifiers._top_k import top_k
from jaxcomm.compression.sparsifiers._variance_based import variance_based
from jaxcomm.compression.sparsifiers._wangni import wangni

__all__ = [
    "ada_comp",
    "adaptive_threshold",
    "block_coordinate",
    "coarse_top_k",
    "nonzero",
    "nonzero_union",
    "random_k",
    "sbc",
    "stc",
    "threshold",
    "top_k",
    "variance_based",
    "wangni",
]
