"""When bytes move: aggregation inside the backward pass, plans of messages, and what they gain.

- `wait_free` sends groups of gradients as soon as they are complete; `aggregate_in_backward` marks
  the layers of a scan; `backward_order` finds the order of leaves, and `estimated_times` when each
  is complete.
- Plans from the seconds of layers on a link: `at_end_plan`, `wait_free_plan`, `bucket_plan`,
  `merge_plan`, `sparsified_plan`, `priority_plan`.
- What a plan gains: `timeline` simulates a step, and `jaxcomm.wire.overlap_report` reads a
  compiled one.
"""

from jaxcomm.scheduling._backward_order import backward_order, estimated_times
from jaxcomm.scheduling._layers import aggregate_in_backward
from jaxcomm.scheduling._plans import (
    at_end_plan,
    bucket_plan,
    merge_plan,
    priority_plan,
    sparsified_plan,
    wait_free_plan,
)
from jaxcomm.scheduling._timeline import Plan, timeline
from jaxcomm.scheduling._times import AlphaBeta, LayerTimes, ring_link
from jaxcomm.scheduling._wait_free import wait_free

__all__ = [
    "LayerTimes",
    "AlphaBeta",
    "Plan",
    "aggregate_in_backward",
    "at_end_plan",
    "backward_order",
    "bucket_plan",
    "estimated_times",
    "merge_plan",
    "priority_plan",
    "ring_link",
    "sparsified_plan",
    "timeline",
    "wait_free",
    "wait_free_plan",
]
