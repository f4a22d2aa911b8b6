"""How workers' updates become one mean over an axis."""

from jaxcomm.aggregation._accumulate import AccumulateState, accumulate
from jaxcomm.aggregation._coded import AggregatorState
from jaxcomm.aggregation._gathered import gathered_mean
from jaxcomm.aggregation._hierarchical import hierarchical
from jaxcomm.aggregation._mean import mean
from jaxcomm.aggregation._merged import merged_mean
from jaxcomm.aggregation._or_reduce import or_reduce
from jaxcomm.aggregation._ring import ring_mean
from jaxcomm.aggregation._shard_local import shard_local
from jaxcomm.aggregation._skip_nonfinite import SkipNonfiniteState, skip_nonfinite
from jaxcomm.aggregation._summed import summed_mean
from jaxcomm.aggregation._two_stage import two_stage_mean
from jaxcomm.aggregation._votes import votes

__all__ = [
    "AccumulateState",
    "AggregatorState",
    "SkipNonfiniteState",
    "accumulate",
    "gathered_mean",
    "hierarchical",
    "mean",
    "merged_mean",
    "or_reduce",
    "ring_mean",
    "shard_local",
    "skip_nonfinite",
    "summed_mean",
    "two_stage_mean",
    "votes",
]
