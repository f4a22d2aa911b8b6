"""Sparsifiers: codecs that send fewer coordinates."""

from jaxcomm.compression.sparsifiers._ada_comp import AdaCompPayload, ada_comp
from jaxcomm.compression.sparsifiers._adaptive_threshold import TwoMeansPayload, adaptive_threshold
from jaxcomm.compression.sparsifiers._block_coordinate import BlockPayload, block_coordinate
from jaxcomm.compression.sparsifiers._coarse_top_k import CoarsePayload, coarse_top_k
from jaxcomm.compression.sparsifiers._nonzero import nonzero
from jaxcomm.compression.sparsifiers._nonzero_union import UnionPayload, nonzero_union
from jaxcomm.compression.sparsifiers._random_k import RandomKPayload, random_k
from jaxcomm.compression.sparsifiers._sbc import BinaryPayload, sbc
from jaxcomm.compression.sparsifiers._sparse import SparsePayload
from jaxcomm.compression.sparsifiers._stc import TernaryPayload, stc
from jaxcomm.compression.sparsifiers._threshold import threshold
from jaxcomm.compression.sparsifiers._top_k import top_k
from jaxcomm.compression.sparsifiers._variance_based import VariancePayload, variance_based
from jaxcomm.compression.sparsifiers._wangni import wangni

__all__ = [
    "AdaCompPayload",
    "BinaryPayload",
    "BlockPayload",
    "CoarsePayload",
    "RandomKPayload",
    "SparsePayload",
    "TernaryPayload",
    "TwoMeansPayload",
    "UnionPayload",
    "VariancePayload",
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
