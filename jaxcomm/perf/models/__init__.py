"""The cost models of papers, as functions of their own symbols."""

from jaxcomm.perf.models._global_qsgd import (
    largest_bandwidth_that_pays,
    tree_all_reduce_seconds,
    tree_speedup,
)
from jaxcomm.perf.models._mg_wfbp import (
    MG_WFBP_10GBE,
    MG_WFBP_56GB,
    AffineCost,
    wait_free_seconds,
)
from jaxcomm.perf.models._s2_reducer import s2_reducer_bytes, s2_reducer_variance
from jaxcomm.perf.models._utility import (
    all_gather_seconds,
    compressed_seconds,
    ring_all_reduce_seconds,
    synchronous_seconds,
)

__all__ = [
    "MG_WFBP_10GBE",
    "MG_WFBP_56GB",
    "AffineCost",
    "all_gather_seconds",
    "compressed_seconds",
    "largest_bandwidth_that_pays",
    "ring_all_reduce_seconds",
    "s2_reducer_bytes",
    "s2_reducer_variance",
    "synchronous_seconds",
    "tree_all_reduce_seconds",
    "tree_speedup",
    "wait_free_seconds",
]
