"""When bytes move: groups of gradients are aggregated while the backward pass goes on."""

from jaxcomm.scheduling._layers import aggregate_in_backward
from jaxcomm.scheduling._overlap import Overlap, OverlapReport, overlap_report
from jaxcomm.scheduling._wait_free import WaitFreeState, aggregates_in_backward, wait_free

__all__ = ["WaitFreeState", "aggregate_in_backward", "aggregates_in_backward", "wait_free"]
