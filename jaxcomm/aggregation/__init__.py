"""Aggregators: transformations that replace each worker's update by a mean over workers."""

from jaxcomm.aggregation._accumulate import accumulate
from jaxcomm.aggregation._adaptive_budgets import adaptive_budgets
from jaxcomm.aggregation._adaptive_ratio import adaptive_ratio
from jaxcomm.aggregation._all_gather import all_gather_mean
from jaxcomm.aggregation._all_reduce import all_reduce_mean, merged_mean
from jaxcomm.aggregation._backup import backup
from jaxcomm.aggregation._budgeted import budgeted_mean
from jaxcomm.aggregation._built import aggregator, coded_aggregator
from jaxcomm.aggregation._coded import AggregatorOptions
from jaxcomm.aggregation._delayed import delayed
from jaxcomm.aggregation._gradient_norms import gradient_norms
from jaxcomm.aggregation._hierarchical import hierarchical, sliced
from jaxcomm.aggregation._lazy import lazy
from jaxcomm.aggregation._majority_vote import majority_vote
from jaxcomm.aggregation._mean import mean
from jaxcomm.aggregation._ring import recursive_doubling_mean, ring_mean
from jaxcomm.aggregation._shard_local import shard_local
from jaxcomm.aggregation._sharded_server import sharded_server
from jaxcomm.aggregation._skip_nonfinite import skip_nonfinite
from jaxcomm.aggregation._two_stage import two_stage_mean
from jaxcomm.aggregation._warmup import warmup
from jaxcomm.aggregation._weight_gather import secondary_partition, weight_gather
from jaxcomm.aggregation._zeroth_order import zeroth_order, zeroth_order_gradient

__all__ = [
    "aggregator",
    "coded_aggregator",
    "AggregatorOptions",
    "accumulate",
    "adaptive_budgets",
    "adaptive_ratio",
    "backup",
    "budgeted_mean",
    "delayed",
    "lazy",
    "recursive_doubling_mean",
    "all_gather_mean",
    "gradient_norms",
    "hierarchical",
    "mean",
    "merged_mean",
    "ring_mean",
    "shard_local",
    "sharded_server",
    "skip_nonfinite",
    "sliced",
    "all_reduce_mean",
    "two_stage_mean",
    "majority_vote",
    "warmup",
    "secondary_partition",
    "weight_gather",
    "zeroth_order",
    "zeroth_order_gradient",
]
