"""How workers' updates become one mean over an axis."""

from jaxcomm.aggregation._accumulate import AccumulateState, accumulate
from jaxcomm.aggregation._adaptive_ratio import AdaptiveRatioState, adaptive_ratio
from jaxcomm.aggregation._coded import AggregatorState
from jaxcomm.aggregation._density import gradient_density
from jaxcomm.aggregation._doubling import doubling_mean
from jaxcomm.aggregation._fetch_sgd import fetch_sgd
from jaxcomm.aggregation._gathered import gathered_mean
from jaxcomm.aggregation._gtop_k import gtop_k
from jaxcomm.aggregation._hierarchical import hierarchical
from jaxcomm.aggregation._mean import mean
from jaxcomm.aggregation._merged import merged_mean
from jaxcomm.aggregation._options import AggregatorOptions
from jaxcomm.aggregation._or_reduce import or_reduce
from jaxcomm.aggregation._ring import ring_mean
from jaxcomm.aggregation._shard_local import shard_local
from jaxcomm.aggregation._sketched_sgd import sketched_sgd
from jaxcomm.aggregation._skip_nonfinite import SkipNonfiniteState, skip_nonfinite
from jaxcomm.aggregation._summed import summed_mean
from jaxcomm.aggregation._two_stage import two_stage_mean
from jaxcomm.aggregation._votes import votes
from jaxcomm.aggregation._warm_up import WarmUpState, warm_up, warm_up_schedule

__all__ = [
    "AccumulateState",
    "AdaptiveRatioState",
    "AggregatorOptions",
    "AggregatorState",
    "SkipNonfiniteState",
    "WarmUpState",
    "accumulate",
    "adaptive_ratio",
    "doubling_mean",
    "fetch_sgd",
    "gathered_mean",
    "gradient_density",
    "gtop_k",
    "hierarchical",
    "mean",
    "merged_mean",
    "or_reduce",
    "ring_mean",
    "shard_local",
    "sketched_sgd",
    "skip_nonfinite",
    "summed_mean",
    "two_stage_mean",
    "votes",
    "warm_up",
    "warm_up_schedule",
]
