"""A discrete-event timeline of one training step: backward, encode, link, decode, next forward."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Literal, NamedTuple

from jaxcomm.scheduling._times import AlphaBeta, LayerTimes


class Plan(NamedTuple):
    """Which layers travel in one message, and in which order.

    Layers are positions in the :class:`LayerTimes` of the plan, so in backward order.

    Attributes:
      groups: The layers of each message. A message is ready when its layers are encoded.
      sizes: The bytes that each layer sends.
      parts: Into how many equal parts each message is cut; the link may change to another message
        between two parts.
      priorities: A number per message: of the messages that are ready, the link takes the one with
        the smallest. Among equal ones it takes the one that was ready first.
      ratios: The fraction of the coordinates that each layer sends.
      overlap: Whether a message may be sent during the backward pass, or all wait for its end.
      barrier: Whether the next forward pass waits for all layers, or each layer for its own.
    """

    groups: tuple[tuple[int, ...], ...]
    sizes: tuple[float, ...]
    parts: tuple[int, ...]
    priorities: tuple[int, ...]
    ratios: tuple[float, ...]
    overlap: bool = True
    barrier: bool = True

    @property
    def messages(self) -> int:
        """The number of messages of a step; each part is one."""
        return sum(self.parts)

    def named(self, times: LayerTimes) -> tuple[tuple[str, ...], ...]:
        """The groups by the names of their layers, for the `plan` of :func:`wait_free`."""
        names = times.names
        return tuple(tuple(names[layer] for layer in group) for group in self.groups)

    def message_bytes(self, group: int) -> float:
        """The bytes of a group, in all of its parts."""
        return sum(self.sizes[layer] for layer in self.groups[group])


Kind = Literal["backward", "encode", "send", "decode", "forward"]


class TimelineEvent(NamedTuple):
    """What a stream does from `start` to `end`.

    Attributes:
      stream: `"compute"` or `"link"`.
      kind: `"backward"`, `"encode"`, `"send"`, `"decode"` or `"forward"`.
      name: The layer, the first and the last layer of a group, or a part of a group.
      layers: The positions of its layers.
      start: Seconds from the start of the backward pass.
      end: Seconds from the start of the backward pass.
    """

    stream: Literal["compute", "link"]
    kind: Kind
    name: str
    layers: tuple[int, ...]
    start: float
    end: float


class Timeline(NamedTuple):
    """A step from the start of a backward pass to the start of the next one.

    Attributes:
      events: What happens, per stream in the order of time. What takes no time is omitted, except
        messages.
      step_seconds: The seconds of the step, so from one backward pass to the next.
      compute_seconds: The seconds in which the compute stream is busy.
      link_seconds: The seconds in which the link is busy.
    """

    events: tuple[TimelineEvent, ...]
    step_seconds: float
    compute_seconds: float
    link_seconds: float

    @property
    def exposed_seconds(self) -> float:
        """The seconds in which the compute stream waits for the link."""
        return self.step_seconds - self.compute_seconds

    @property
    def overlap(self) -> float:
        """The fraction of the link's seconds that computation hides; 1 without a message."""
        return 1.0 - self.exposed_seconds / self.link_seconds if self.link_seconds else 1.0


class _Compute:
    """The compute stream: one thing after another."""

    def __init__(self, times: LayerTimes) -> None:
        self.names = times.names
        self.clock = self.busy = 0.0
        self.events: list[TimelineEvent] = []

    def run(self, kind: Kind, layers: tuple[int, ...], seconds: float) -> None:
        if seconds:
            begins, self.clock = self.clock, self.clock + seconds
            self.busy += seconds
            name = _name(self.names, layers)
            self.events.append(TimelineEvent("compute", kind, name, layers, begins, self.clock))


def _name(names: Sequence[str], layers: tuple[int, ...]) -> str:
    first, last = names[layers[0]], names[layers[-1]]
    return first if len(layers) == 1 else f"{first}-{last}"


def _backward(compute: _Compute, times: LayerTimes, plan: Plan) -> list[float]:
    """Runs the backward pass; when each message is ready."""
    closes = {max(group): number for number, group in enumerate(plan.groups)}
    ready = [0.0] * len(plan.groups)
    for layer in range(len(times)):
        compute.run("backward", (layer,), times.backward[layer])
        if layer in closes:
            group = plan.groups[closes[layer]]
            compute.run("encode", group, sum(times.encode[each] for each in group))
            ready[closes[layer]] = compute.clock
    return ready if plan.overlap else [compute.clock] * len(ready)


def _send(
    link: AlphaBeta, times: LayerTimes, plan: Plan, ready: list[float]
) -> tuple[list[TimelineEvent], list[float]]:
    """What the link does, and when each group has arrived."""
    events: list[TimelineEvent] = []
    arrived = [0.0] * len(ready)
    coming = sorted(range(len(ready)), key=lambda group: (ready[group], group), reverse=True)
    waiting: list[tuple[int, float, int, int]] = []  # priority, ready, group, part
    clock = 0.0
    while coming or waiting:
        if not waiting:
            clock = max(clock, ready[coming[-1]])
        while coming and ready[coming[-1]] <= clock:
            group = coming.pop()
            heapq.heappush(waiting, (plan.priorities[group], ready[group], group, 0))
        priority, since, group, part = heapq.heappop(waiting)
        parts, layers = plan.parts[group], plan.groups[group]
        ends = clock + link.seconds(plan.message_bytes(group) / parts)
        name = _name(times.names, layers) + (f" {part + 1}/{parts}" if parts > 1 else "")
        events.append(TimelineEvent("link", "send", name, layers, clock, ends))
        clock = ends
        if part + 1 < parts:
            heapq.heappush(waiting, (priority, since, group, part + 1))
        else:
            arrived[group] = ends
    return events, arrived


def _forward(compute: _Compute, times: LayerTimes, plan: Plan, arrived: list[float]) -> None:
    """Decodes what arrives, and runs the next forward pass from the first layer of the model on.

    The stream never waits while there is something to do. A layer whose gradient is decoded goes
    first; then the decoding of the group that the forward pass needs first.
    """
    group_of = {layer: number for number, group in enumerate(plan.groups) for layer in group}
    to_decode = set(range(len(plan.groups)))
    layer = len(times) - 1
    while layer >= 0 or to_decode:
        is_free = not to_decode if plan.barrier else layer >= 0 and group_of[layer] not in to_decode
        if is_free:
            compute.run("forward", (layer,), times.forward[layer])
            layer -= 1
            continue
        here = [group for group in to_decode if arrived[group] <= compute.clock]
        if not here:
            compute.clock = min(arrived[group] for group in to_decode)
            continue
        group = max(here, key=lambda number: (max(plan.groups[number]), -number))
        layers = plan.groups[group]
        compute.run("decode", layers, sum(times.decode[each] for each in layers))
        to_decode.remove(group)


def timeline(times: LayerTimes, link: AlphaBeta, plan: Plan) -> Timeline:
    """Simulates one step of a plan: when each layer is computed, encoded, sent and decoded.

    Two streams run side by side. The compute stream runs the backward pass, and encodes each group
    after its last layer. The link sends one message at a time, or one part of a message, by the
    priorities of the plan. After the backward pass, the compute stream decodes what has arrived and
    runs the next forward pass, whose first layer is the last one of `times`. With a barrier, the
    forward pass begins when all layers are decoded. Streams do not slow each other down.

    Args:
      times: The layers.
      link: The link.
      plan: A plan for these layers.

    Returns:
      The step: `step_seconds`, from one backward pass to the next; `compute_seconds` and
      `link_seconds`, in which each stream is busy; `exposed_seconds`, in which computation waits
      for the link; `overlap`, the fraction of the link's seconds that computation hides, 1 without
      a message; and `events`, per stream in the order of time. An event has its `stream`,
      `"compute"` or `"link"`; `kind`, `"backward"`, `"encode"`, `"send"`, `"decode"` or
      `"forward"`; `name` and `layers`; and `start` and `end`, seconds from the start of the
      backward pass.

    Raises:
      ValueError: If an argument is out of range, or the plan is for other layers.

    Example:
      >>> from jaxcomm import scheduling
      >>> times = scheduling.LayerTimes(
      ...     sizes=[4e6, 4e6], backward=[3e-3, 3e-3], forward=[2e-3, 2e-3]
      ... )
      >>> link = scheduling.AlphaBeta(latency=1e-3, bytes_per_second=1e9)
      >>> late = scheduling.timeline(times, link, scheduling.at_end_plan(times))
      >>> early = scheduling.timeline(times, link, scheduling.wait_free_plan(times))
      >>> round(late.step_seconds, 4), round(early.step_seconds, 4)
      (0.019, 0.017)
    """
    layers = sorted(layer for group in plan.groups for layer in group)
    if layers != [*range(len(times))] or not all(plan.groups):
        raise ValueError(f"`plan.groups` must have each of {len(times)} layers exactly once.")
    compute = _Compute(times)
    ready = _backward(compute, times, plan)
    sent, arrived = _send(link, times, plan, ready)
    _forward(compute, times, plan, arrived)
    busy = sum(event.end - event.start for event in sent)
    return Timeline((*compute.events, *sent), compute.clock, compute.busy, busy)
