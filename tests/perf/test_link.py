"""Links are read from texts and presets, and mistakes are one clear line."""

import math
from typing import Any

import pytest

from jaxcomm import perf
from jaxcomm.perf._link import DEVICES, LINKS, to_device, to_link


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [
        ("10gbit", 1.25e9), ("200Mbps", 25e6), ("200 Mbit/s", 25e6), ("1Gb/s", 125e6),
        ("1gB/s", 1e9), ("10MBps", 10e6), ("10Mbps", 1.25e6), ("2.5e3 kbit", 312500.0),
        ("8bit", 1.0), ("1TB/s", 1e12),
    ],
)  # fmt: skip
def test_a_bandwidth_is_read(text: str, bytes_per_second: float) -> None:
    link = to_link(text)
    assert link.bytes_per_second == pytest.approx(bytes_per_second) and link.latency == 50e-6


@pytest.mark.parametrize(("text", "latency"), [("5ms", 5e-3), ("7us", 7e-6), ("0s", 0.0)])
def test_a_latency_is_read(text: str, latency: float) -> None:
    assert to_link(f"1Gbit, {text}").latency == pytest.approx(latency)


@pytest.mark.parametrize(
    "text",
    ["", "10", "Gbit", "-1Gbit", "0.0mbit", "1..2Gbit", "1Gbit, 5", "1Gbit, 5ms, 5ms", "50us"],
)
def test_invalid_bandwidths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"`link` must be a `perf\.Link`, or a bandwidth"):
        to_link(text)


@pytest.mark.parametrize("wrong", [0, math.nan, math.inf, "fast"])
def test_a_link_has_finite_numbers(wrong: Any) -> None:
    with pytest.raises(ValueError, match="`bytes_per_second` must be a finite number above 0"):
        perf.Link(wrong, 0.0, "mine")


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"got 'ethernet-11gbit'. Presets: wan-100mbit, eth"):
        to_link("ethernet-11gbit")
    with pytest.raises(ValueError, match=r"preset \(cpu-core.*got 'a101'"):
        to_device("a101")
    presets: dict[str, Any] = {**LINKS, **DEVICES}
    for name, preset in presets.items():
        assert preset.name == name
        assert any(word in preset.source for word in ("nominal", "measured", "assumption"))
