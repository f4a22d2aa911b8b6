"""Layers and links: defaults, and one-line errors."""

import math

import numpy as np
import pytest

from jaxcomm.scheduling import AlphaBeta, LayerTimes, ring_link


def test_defaults() -> None:
    times = LayerTimes(sizes=np.array([1, 2]), backward=[0, 0.5])
    assert times.sizes == (1.0, 2.0) and times.backward == (0.0, 0.5)
    assert times.encode == times.decode == times.forward == (0.0, 0.0)
    assert times.names == ("layer1", "layer0") and len(times) == 2
    assert hash(times) == hash(LayerTimes([1, 2], [0, 0.5])) and times == LayerTimes(
        [1, 2], [0, 0.5]
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"sizes": [1, -1], "backward": [1, 1]}, "`sizes` must have a finite number per layer"),
        ({"sizes": [1], "backward": [-1]}, "`backward` must have"),
        ({"sizes": [1], "backward": [math.nan]}, "`backward` must have"),
        ({"sizes": [1], "backward": [math.inf]}, "`backward` must have"),
        ({"sizes": [1], "backward": [1], "decode": [1, 2]}, "`decode` must have"),
    ],
)
def test_wrong_layers(fields: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text) as error:
        LayerTimes(**fields)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("latency", "bytes_per_second", "text"),
    [
        (-1e-3, 1e9, "`latency` must be a finite number of at least 0"),
        (math.nan, 1e9, "`latency`"),
        (math.inf, 1e9, "`latency`"),
        (0, 0, "`bytes_per_second` must be a finite number above 0, got 0"),
        (0, -1, "`bytes_per_second`"),
        (0, math.nan, "`bytes_per_second`"),
    ],
)
def test_wrong_links(latency: float, bytes_per_second: float, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        AlphaBeta(latency, bytes_per_second)


def test_a_ring_takes_its_hops() -> None:
    workers, latency, bandwidth, size = 6, 3e-5, 1.25e9, 4e7
    hops = 2 * (workers - 1) * (latency + size / workers / bandwidth)
    link = ring_link(workers, latency=latency, bytes_per_second=bandwidth)
    assert link.seconds(size) == pytest.approx(hops, rel=1e-12)
    assert ring_link(2, latency=0, bytes_per_second=math.inf) == AlphaBeta(0.0, math.inf)
