"""Sparsified pipelining: each layer sends as many coordinates as hide behind computation."""

from __future__ import annotations

import dataclasses
import math

from jaxcomm.scheduling._merge_plan import merge_plan
from jaxcomm.scheduling._plan import Plan, wait_free_plan
from jaxcomm.scheduling._times import (
    AlphaBeta,
    LayerTimes,
    ready_seconds,
    require_link,
    require_number,
    require_times,
)


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


def sparsified_plan(
    times: LayerTimes,
    link: AlphaBeta,
    *,
    max_compression: float = 1000.0,
    expansion: float = 2.0,
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
    require_times(times)
    require_link(link)
    most = require_number(max_compression, "max_compression", 1.0)
    factor = require_number(expansion, "expansion", 1.0)
    least = [min(size, factor * size / most) for size in times.sizes]
    sizes = _hidden_bytes(times, link, least)
    ratios = tuple(
        1.0 if size == dense else size / (factor * dense)
        for size, dense in zip(sizes, times.sizes, strict=True)
    )
    sparse = dataclasses.replace(times, sizes=sizes)
    plan = merge_plan(sparse, link) if merge else wait_free_plan(sparse)
    return plan._replace(ratios=ratios)
