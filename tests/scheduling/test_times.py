"""Layers and links: defaults, and the ring."""

import math

import numpy as np
import pytest

from jaxcomm.scheduling import AlphaBeta, LayerTimes, ring_link


def test_defaults() -> None:
    times = LayerTimes(sizes=np.array([1, 2]), backward=[0, 0.5])
    assert times.sizes == (1.0, 2.0) and times.backward == (0.0, 0.5)
    assert times.encode == times.decode == times.forward == (0.0, 0.0)
    assert times.names == ("layer1", "layer0") and len(times) == 2
    assert times == LayerTimes([1, 2], [0, 0.5])


def test_a_ring_takes_one_latency_per_hop() -> None:
    workers, latency, bandwidth, size = 6, 3e-5, 1.25e9, 4e7
    hops = 2 * (workers - 1) * (latency + size / workers / bandwidth)
    link = ring_link(workers, latency=latency, bytes_per_second=bandwidth)
    assert link.seconds(size) == pytest.approx(hops, rel=1e-12)
    assert ring_link(2, latency=0, bytes_per_second=math.inf) == AlphaBeta(0.0, math.inf)
