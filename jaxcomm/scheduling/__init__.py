"""Scheduling: when bytes move. Plans of messages, and a timeline of a step that follows a plan."""

from jaxcomm.scheduling._merge_plan import merge_plan
from jaxcomm.scheduling._plan import Plan, at_end_plan, bucket_plan, wait_free_plan
from jaxcomm.scheduling._priority import priority_plan
from jaxcomm.scheduling._sparsified import sparsified_plan
from jaxcomm.scheduling._timeline import Event, Timeline, timeline
from jaxcomm.scheduling._times import LayerTimes, Link, ring_link

__all__ = [
    "Event",
    "LayerTimes",
    "Link",
    "Plan",
    "Timeline",
    "at_end_plan",
    "bucket_plan",
    "merge_plan",
    "priority_plan",
    "ring_link",
    "sparsified_plan",
    "timeline",
    "wait_free_plan",
]
