"""Fewer coordinates."""

from jaxcomm.compression.sparsifiers._sparse import SparsePayload
from jaxcomm.compression.sparsifiers._top_k import top_k

__all__ = ["SparsePayload", "top_k"]
