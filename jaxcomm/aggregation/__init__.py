"""How workers' updates become one mean over an axis."""

from jaxcomm.aggregation._coded import AggregatorState
from jaxcomm.aggregation._gathered import gathered_mean
from jaxcomm.aggregation._mean import mean
from jaxcomm.aggregation._summed import summed_mean

__all__ = ["AggregatorState", "gathered_mean", "mean", "summed_mean"]
