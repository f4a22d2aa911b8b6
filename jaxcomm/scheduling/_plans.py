"""Plans: which layers a message has, into how many parts it is cut, and which goes first."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Literal

import numpy as np

from jaxcomm._require import AboveZero, Range, checked
from jaxcomm.scheduling._timeline import Plan, timeline
from jaxcomm.scheduling._times import AlphaBeta, LayerTimes, ready_seconds


def dense_plan(times: LayerTimes, groups: tuple[tuple[int, ...], ...]) -> Plan:
    """A plan that sends whole layers in groups, first come, first served."""
    ones = (1,) * len(groups)
    return Plan(groups, tuple(times.sizes), ones, (0,) * len(groups), (1.0,) * len(times))


def contiguous(starts: list[int], count: int) -> tuple[tuple[int, ...], ...]:
    """The groups of consecutive layers that begin at `starts`."""
    ends = [*starts[1:], count]
    return tuple(tuple(range(a, b)) for a, b in zip(starts, ends, strict=True))


def wait_free_plan(times: LayerTimes) -> Plan:
    """One message per layer, sent as soon as the layer is encoded: wait-free backpropagation.

    Args:
      times: The layers.

    Returns:
      A plan with a message per layer, first come, first served.

    Example:
      >>> from jaxcomm import scheduling
      >>> times = scheduling.LayerTimes(sizes=[8e6, 4e6], backward=[2e-3, 1e-3])
      >>> scheduling.wait_free_plan(times).groups
      ((0,), (1,))

    References:
      Zhang et al., `Poseidon: An Efficient Communication Architecture for Distributed Deep Learning
      on GPU Clusters <https://arxiv.org/abs/1706.03292>`_, 2017.
    """
    return dense_plan(times, tuple((layer,) for layer in range(len(times))))


def at_end_plan(times: LayerTimes) -> Plan:
    """All layers in one message after the backward pass, which no message overlaps.

    Args:
      times: The layers.

    Returns:
      A plan without overlap.

    Example:
      >>> from jaxcomm import scheduling
      >>> times = scheduling.LayerTimes(sizes=[8e6, 4e6], backward=[2e-3, 1e-3])
      >>> scheduling.at_end_plan(times).groups
      ((0, 1),)
    """
    return dense_plan(times, (tuple(range(len(times))),))._replace(overlap=False)


@checked
def bucket_plan(times: LayerTimes, *, bucket_bytes: AboveZero = 25 * 2**20) -> Plan:
    """Buckets of consecutive layers, each closed when it has a number of bytes.

    Args:
      times: The layers.
      bucket_bytes: A bucket takes layers until it has at least as many bytes.

    Returns:
      A plan with a message per bucket, first come, first served.

    Raises:
      ValueError: If `bucket_bytes` is not above 0.

    Example:
      >>> from jaxcomm import scheduling
      >>> times = scheduling.LayerTimes(sizes=[8e6, 4e6, 1e6], backward=[2e-3, 1e-3, 1e-3])
      >>> scheduling.bucket_plan(times, bucket_bytes=10e6).groups
      ((0, 1), (2,))

    References:
      Li et al., `PyTorch Distributed: Experiences on Accelerating Data Parallel Training
      <https://arxiv.org/abs/2006.15704>`_, 2020. Its first bucket is smaller; ours are equal.
    """
    starts, held = [0], 0.0
    for layer, size in enumerate(times.sizes):
        if held >= bucket_bytes:
            starts.append(layer)
            held = 0.0
        held += size
    return dense_plan(times, contiguous(starts, len(times)))


class _Problem:
    """The sums over layers that every partition into groups shares."""

    def __init__(self, times: LayerTimes, link: AlphaBeta) -> None:
        self.count = len(times)
        self.ready = ready_seconds(times)
        self.offsets = np.concatenate([[0.0], np.cumsum(times.sizes)])
        self.link = link
        # The seconds to decode a layer and all later ones.
        self.left = np.cumsum(times.decode[::-1])[::-1]
        self.computed = float(self.ready[-1] + self.left[0])
        # Of Python floats, whose sums are those of NumPy but take less time one by one.
        self.lists = self.ready.tolist(), self.offsets.tolist(), self.left.tolist()

    def earliest(self, bound: float) -> tuple[float, list[int]]:
        """The earliest arrival of all layers, and the first layers of its groups.

        Of the partitions whose groups all arrive early enough that what is left can be decoded
        until `bound`. The arrival is infinite if there is none.
        """
        arrivals = np.zeros(self.count + 1)
        firsts = np.zeros(self.count + 1, int)
        for last in range(1, self.count + 1):
            sent = self.offsets[last] - self.offsets[:last]
            ends = np.maximum(arrivals[:last], self.ready[last]) + self.link.seconds(sent)
            ends[ends + self.left[:last] > bound] = math.inf
            firsts[last] = np.argmin(ends)
            arrivals[last] = ends[firsts[last]]
        starts, last = [], self.count
        while last and math.isfinite(arrivals[-1]):
            last = int(firsts[last])
            starts.append(last)
        return float(arrivals[-1]), starts[::-1]

    def seconds(self, starts: list[int]) -> float:
        """The seconds until all layers are decoded."""
        free, decoded = 0.0, self.computed
        ready, offsets, left = self.lists
        for first, last in zip(starts, [*starts[1:], self.count], strict=True):
            free = max(free, ready[last]) + self.link.seconds(offsets[last] - offsets[first])
            decoded = max(decoded, free + left[first])
        return decoded


def _optimal(problem: _Problem) -> list[int]:
    """A partition with the fewest seconds, by bisection of the bound of a dynamic program."""
    arrival, best = problem.earliest(math.inf)
    most = problem.seconds(best)
    # The last layer is decoded after all have arrived.
    least = max(problem.computed, arrival + float(problem.left[-1]))
    if least < most and (found := problem.earliest(least)[1]):
        return found
    while least < (bound := (least + most) / 2) < most:
        found = problem.earliest(bound)[1]
        if found:
            best, most = found, min(bound, problem.seconds(found))
        else:
            least = bound
    return best


def _greedy(problem: _Problem) -> list[int]:
    """The rule of the paper: wait for the next layer if that takes less than a latency.

    The paper also asks whether the next layer is ready before the message has been sent, which
    follows.
    """
    ready, offsets, _ = problem.lists
    starts, free = [0], 0.0
    for last in range(1, problem.count):
        begins = max(free, ready[last])
        if ready[last + 1] - begins >= problem.link.latency:
            free = begins + problem.link.seconds(offsets[last] - offsets[starts[-1]])
            starts.append(last)
    return starts


@checked
def merge_plan(
    times: LayerTimes, link: AlphaBeta, *, method: Literal["optimal", "greedy"] = "optimal"
) -> Plan:
    r"""The consecutive layers to merge into one message, for the shortest step: MG-WFBP.

    A merged message saves latencies, but begins later. The first :math:`j` layers are encoded at
    :math:`r_j`, and the layers from :math:`i` to before :math:`j` have :math:`S_{ij}` bytes. So the
    earliest time at which the first :math:`j` layers have arrived is

    .. math:: A_j = \min_{i < j} \left( \max(A_i, r_j) + \alpha + \beta S_{ij} \right), \qquad
              A_0 = 0 .

    Let :math:`D_i` be the seconds to decode the layers from :math:`i` on. For the step to end at
    :math:`C`, a group that begins at layer :math:`i` must arrive until :math:`C - D_i`. A bisection
    finds the smallest :math:`C` for which the minimum under this condition is finite.

    Of the fastest plans it is one that sends early: a message that hides
    anyway is not merged further, which would leave less time to spare on a slower link.

    The cost is :math:`O(L^2)` for :math:`L` layers without decoding, and at most some 60 times as
    much with it.

    Args:
      times: The layers.
      link: The link.
      method: `"optimal"`: no partition into consecutive layers is faster in the model. `"greedy"`:
        the rule of the paper, which looks one layer ahead: it merges if the next layer is ready
        less than a latency after the message could begin. It is never slower than a single message,
        nor, if decoding takes no time, than no merging.

    Returns:
      A plan of consecutive layers, first come, first served.

    Raises:
      ValueError: If an argument is out of range.

    Example:
      >>> from jaxcomm import scheduling
      >>> times = scheduling.LayerTimes(sizes=[4e6, 1e4, 1e4, 1e4], backward=[2e-3] * 4)
      >>> link = scheduling.AlphaBeta(latency=2e-3, bytes_per_second=1e9)
      >>> scheduling.merge_plan(times, link).groups
      ((0,), (1, 2, 3))

    References:
      Shi, Chu, Li, `MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD
      Algorithms <https://arxiv.org/abs/1811.11141>`_, 2019, which calls its greedy rule optimal. In
      its model it was slower than the optimum in 180 of 360 random cases, by up to 31 %.
    """
    problem = _Problem(times, link)
    starts = _optimal(problem) if method == "optimal" else _greedy(problem)
    return dense_plan(times, contiguous(starts, len(times)))


_MOST_PARTS = 64  # Of the largest layer, when the plan chooses.


def _cut(times: LayerTimes, part_bytes: float) -> Plan:
    """The plan with parts of at most `part_bytes`."""
    parts = tuple(max(1, math.ceil(size / part_bytes)) for size in times.sizes)
    # The first layer of the model is the last in backward order.
    priorities = tuple(range(len(times) - 1, -1, -1))
    return wait_free_plan(times)._replace(parts=parts, priorities=priorities, barrier=False)


@checked
def priority_plan(
    times: LayerTimes, link: AlphaBeta, *, part_bytes: AboveZero | None = None
) -> Plan:
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
    if part_bytes is not None:
        return _cut(times, part_bytes)
    largest = max(times.sizes)
    plans = [_cut(times, largest / 2**k) for k in range(_MOST_PARTS.bit_length())]
    seconds = [timeline(times, link, plan).step_seconds for plan in plans]
    # More parts must gain more than the rounding errors of their sums.
    return next(p for p, s in zip(plans, seconds, strict=True) if s <= min(seconds) * (1 + 1e-9))


def _hidden_bytes(times: LayerTimes, link: AlphaBeta, least: list[float]) -> list[float]:
    """The bytes of each layer: as many as hide, between `least` and those of the dense layer."""
    if math.isinf(link.bytes_per_second):
        return list(times.sizes)
    ready, free, sizes = ready_seconds(times), 0.0, []
    for layer, dense in enumerate(times.sizes):
        begins = max(free, float(ready[layer + 1]))
        # Nothing is computed behind the message of the first layer of the model.
        window = float(ready[min(layer + 2, len(times))]) - begins
        hidden = (window - link.latency) * link.bytes_per_second if window > link.latency else 0.0
        sizes.append(min(dense, max(least[layer], hidden)))
        free = begins + link.seconds(sizes[-1])
    return sizes


@checked
def sparsified_plan(
    times: LayerTimes,
    link: AlphaBeta,
    *,
    max_compression: Annotated[float, Range(least=1)] = 1000.0,
    expansion: Annotated[float, Range(least=1)] = 2.0,
    merge: bool = True,
) -> Plan:
    r"""A fraction of the coordinates per layer, so that sending it hides behind computation: LAGS.

    The message of a layer begins when the layer is encoded and the link is free. It gets the bytes
    that arrive before the next layer is encoded. With :math:`w` the seconds until then, a layer of
    :math:`s` bytes sends the fraction

    .. math:: \rho = \min\left( 1, \max\left( \frac{1}{c_\text{max}},
              \frac{w - \alpha}{\beta e s} \right) \right)

    of its coordinates, with :math:`e` the `expansion`. If the bytes of all of its coordinates
    without indices hide, or are no more than those with indices, it is sent as it is, with the
    ratio 1. Behind the first layer of the model, nothing is left to compute, so it sends
    :math:`1 / c_\text{max}`. With infinite bandwidth, all layers are sent as they are.

    Then the dynamic program of :func:`merge_plan` merges messages that are mostly latency.

    Args:
      times: The layers, with the bytes that they would send without sparsification, and the seconds
        to select coordinates in `encode`.
      link: The link.
      max_compression: :math:`c_\text{max}`, the inverse of the smallest fraction.
      expansion: The bytes of a coordinate that is sent, relative to those of a dense one; 2 for an
        index of 32 bits beside each float32. If payloads are gathered, they also grow with the
        number of workers.
      merge: Whether to merge messages.

    Returns:
      A plan with the ratio and the bytes of each layer.

    Raises:
      ValueError: If an argument is out of range.

    Example:
      >>> from jaxcomm import scheduling
      >>> times = scheduling.LayerTimes(sizes=[8e6, 8e6, 8e6], backward=[2e-3, 5e-3, 1e-2])
      >>> link = scheduling.AlphaBeta(latency=1e-3, bytes_per_second=1e9)
      >>> plan = scheduling.sparsified_plan(times, link)
      >>> plan.ratios, plan.groups
      ((0.25, 1.0, 0.001), ((0,), (1,), (2,)))

    References:
      Shi et al., `Layer-wise Adaptive Gradient Sparsification for Distributed Deep Learning with
      Convergence Guarantees <https://arxiv.org/abs/1911.08727>`_, 2019. Its window is the
      computation of the next layer; ours is less if the link is still busy. Shi et al.,
      *Communication-Efficient Distributed Deep Learning with Merged Gradient Sparsification on
      GPUs*, 2020, selects coordinates of a merged group, whose cost grows faster than its size, and
      merges greedily. Our codecs select in each layer before merging, so that the costs add up and
      the dynamic program is exact.
    """
    least = [min(size, expansion * size / max_compression) for size in times.sizes]
    sizes = _hidden_bytes(times, link, least)
    ratios = tuple(
        1.0 if size == dense else size / (expansion * dense)
        for size, dense in zip(sizes, times.sizes, strict=True)
    )
    sparse = dataclasses.replace(times, sizes=sizes)
    plan = merge_plan(sparse, link) if merge else wait_free_plan(sparse)
    return plan._replace(ratios=ratios)
