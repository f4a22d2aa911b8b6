"""Priorities: layers that the next forward pass needs first overtake others on the link."""

from __future__ import annotations

import math

from jaxcomm.scheduling._plan import Plan, wait_free_plan
from jaxcomm.scheduling._timeline import timeline
from jaxcomm.scheduling._times import (
    AlphaBeta,
    LayerTimes,
    require_link,
    require_number,
    require_times,
)

_MOST_PARTS = 64  # Of the largest layer, when the plan chooses.


def _cut(times: LayerTimes, part_bytes: float) -> Plan:
    """The plan with parts of at most `part_bytes`."""
    parts = tuple(max(1, math.ceil(size / part_bytes)) for size in times.sizes)
    # The first layer of the model is the last in backward order.
    priorities = tuple(range(len(times) - 1, -1, -1))
    return wait_free_plan(times)._replace(parts=parts, priorities=priorities, barrier=False)


def priority_plan(times: LayerTimes, link: AlphaBeta, *, part_bytes: float | None = None) -> Plan:
    r"""One message per layer, cut into parts; front layers go first: P3 and ByteScheduler.

    The next forward pass begins when the first layer of the model has arrived, and runs while later
    layers are still sent. So layers near the input overtake those near the output, which were ready
    before them. Without parts, a large message could not be overtaken; each part costs a latency.

    The plan helps only a program whose optimizer updates each layer separately and that starts the
    next forward pass before the last gradient: `plan.barrier` is False.

    Args:
      times: The layers, with the seconds of the forward pass.
      link: The link.
      part_bytes: The most bytes of a part. With None, the largest layer is cut into 1, 2, 4, ... 64
        parts, and :func:`timeline` decides which of these sizes is best.

    Returns:
      A plan with parts and priorities.

    Raises:
      ValueError: If an argument is out of range.

    Example:
      >>> from jaxcomm import scheduling
      >>> times = scheduling.LayerTimes(
      ...     sizes=[8e6, 1e6], backward=[1e-3, 1e-3], forward=[4e-3, 4e-3]
      ... )
      >>> link = scheduling.AlphaBeta(latency=1e-4, bytes_per_second=1e9)
      >>> plan = scheduling.priority_plan(times, link)
      >>> plan.parts, plan.priorities
      ((2, 1), (1, 0))
      >>> first_come = scheduling.wait_free_plan(times)._replace(barrier=False)
      >>> [
      ...     round(scheduling.timeline(times, link, each).step_seconds, 5)
      ...     for each in (first_come, plan)
      ... ]
      [0.0182, 0.0143]

    References:
      Jayarajan et al., `Priority-based Parameter Propagation for Distributed DNN Training
      <https://arxiv.org/abs/1905.03960>`_, 2019, whose parts go to parameter servers. Peng et al.,
      *A Generic Communication Scheduler for Distributed DNN Training Acceleration* (ByteScheduler),
      2019, which searches part sizes by measured steps; ours are those of the model.
    """
    require_times(times)
    require_link(link)
    if part_bytes is not None:
        return _cut(times, require_number(part_bytes, "part_bytes", strict=True))
    largest = max(times.sizes)
    plans = [_cut(times, largest / 2**k) for k in range(_MOST_PARTS.bit_length())]
    seconds = [timeline(times, link, plan).step_seconds for plan in plans]
    # More parts must gain more than the rounding errors of their sums.
    return next(p for p, s in zip(plans, seconds, strict=True) if s <= min(seconds) * (1 + 1e-9))
