"""Sparsifiers: codecs that send fewer coordinates."""

from jaxcomm.compression.sparsifiers._accumulating import ada_comp, variance_based
from jaxcomm.compression.sparsifiers._block_coordinate import block_coordinate
from jaxcomm.compression.sparsifiers._nonzero import nonzero, nonzero_union
from jaxcomm.compression.sparsifiers._random_k import random_k, wangni
from jaxcomm.compression.sparsifiers._stc import sbc, stc
from jaxcomm.compression.sparsifiers._threshold import adaptive_threshold, threshold
from jaxcomm.compression.sparsifiers._top_k import coarse_top_k, top_k

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
