"""MG-WFBP: which consecutive layers to merge into one message, so that a step is shortest."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from jaxcomm.scheduling._plan import Plan, contiguous, dense_plan
from jaxcomm.scheduling._times import (
    AlphaBeta,
    LayerTimes,
    ready_seconds,
    require_link,
    require_times,
)


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
    problem = _Problem(require_times(times), require_link(link))
    if method not in ("optimal", "greedy"):
        raise ValueError(f'`method` must be "optimal" or "greedy", got {method!r}.')
    starts = _optimal(problem) if method == "optimal" else _greedy(problem)
    return dense_plan(times, contiguous(starts, len(times)))
