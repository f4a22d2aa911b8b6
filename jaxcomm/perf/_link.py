"""Links and devices: given as numbers or text, by the name of a preset, or measured on a mesh."""

import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Mapping

from jaxcomm.scheduling._times import require_number

LATENCY = 50e-6
"""Seconds per message of a link that is given by its bandwidth alone: Ethernet with TCP."""

PRIMITIVES = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "ppermute")
FORMAT = 1
"""The format of a calibration's file that this release writes and reads."""

_QUANTITY = re.compile(r"([0-9.]{1,20}(?:e-?[0-9]{1,2})?) ?([^0-9]*)")
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_RATES = {
    f"{prefix}{unit}": 1000.0**power * (1 if "B" in unit else 1 / 8)
    for power, prefix in enumerate(("", "k", "m", "g", "t"))
    for unit in ("bit/s", "bits", "bit", "bps", "b/s", "Bps", "B/s")
}


@dataclasses.dataclass(frozen=True)
class Link:
    """What one worker sends over: each message costs `latency`, and each byte a part of a second.

    Attributes:
      bytes_per_second: The bandwidth of one worker in one direction.
      latency: Seconds per sequential message; a ring all-reduce has 2 (n - 1) of them.
      name: The name in tables.
      source: Where the numbers are from, and whether they were measured.

    Raises:
      ValueError: If the bandwidth is not positive and finite, or the latency is negative.

    Example:
      >>> from jaxcomm import perf
      >>> perf.Link(bytes_per_second=125e6, latency=50e-6).bytes_per_second
      125000000.0
    """

    bytes_per_second: float
    latency: float = LATENCY
    name: str = "link"
    source: str = "given by the caller"

    def __post_init__(self) -> None:
        require_number(self.bytes_per_second, "bytes_per_second", strict=True)
        require_number(self.latency, "latency")

    def __str__(self) -> str:
        return (
            f"{self.name}: {8e-9 * self.bytes_per_second:.3g} Gbit/s, "
            f"{1e6 * self.latency:.3g} us per message ({self.source})"
        )


@dataclasses.dataclass(frozen=True)
class Device:
    """A device, for the time of encoding where it is not measured.

    Attributes:
      memory_bytes_per_second: Reads and writes of the device's memory.
      name: The name in tables.
      source: Where the number is from.
    """

    memory_bytes_per_second: float
    name: str = "device"
    source: str = "given by the caller"


_LINE_RATE = "nominal line rate; the latency is an assumption for TCP"
_QSGD = "measured by Xin et al. 2023, arXiv 2305.18627; the latency is an assumption"
_DATASHEET = "nominal, the vendor's data sheet"

LINKS: Mapping[str, Link] = {
    name: Link(bytes_per_second, latency, name, source)
    for name, bytes_per_second, latency, source in (
        ("wan-100mbit", 12.5e6, 10e-3, "an assumption: 100 Mbit/s and 20 ms for both ways"),
        ("ethernet-1gbit", 125e6, LATENCY, _LINE_RATE),
        ("ethernet-10gbit", 1.25e9, LATENCY, _LINE_RATE),
        ("ethernet-25gbit", 3.125e9, LATENCY, _LINE_RATE),
        ("ethernet-100gbit", 12.5e9, LATENCY, _LINE_RATE),
        ("infiniband-200gbit", 25e9, 5e-6, "nominal line rate (HDR); the latency is an assumption"),
        ("tpu-dcn", 6.25e9, LATENCY, "nominal 50 Gbit/s of a TPU host; depends on the generation"),
        ("pcie-a100", 5.4e9, 10e-6, f"4 A100 without NVLink (NCCL over shared memory), {_QSGD}"),
        ("nvlink-a100", 53.9e9, 10e-6, f"4 A100, point to point over NVLink, {_QSGD}"),
    )
}
"""Links by name, each with its source. Nominal figures are upper bounds."""

DEVICES: Mapping[str, Device] = {
    name: Device(bytes_per_second, name, source)
    for name, bytes_per_second, source in (
        ("cpu-core", 10e9, "an assumption for one core of a server"),
        ("v100", 900e9, _DATASHEET),
        ("a100", 2039e9, f"{_DATASHEET} (80 GB); Global-QSGD's model has 2 TB/s"),
        ("h100", 3350e9, f"{_DATASHEET} (SXM)"),
        ("h200", 4800e9, _DATASHEET),
        ("tpu-v4", 1228e9, _DATASHEET),
        ("tpu-v5e", 819e9, _DATASHEET),
        ("tpu-v5p", 2765e9, _DATASHEET),
    )
}
"""Devices by name, each with its source."""


def quantity(text: str, units: Mapping[str, float]) -> float:
    """A number times the factor of the unit behind it; NaN, which no range has, for other texts."""
    found = _QUANTITY.fullmatch(text.strip())
    try:
        return float(found[1]) * units[found[2]] if found else math.nan
    except (KeyError, ValueError):
        return math.nan


def to_link(value: Link | str) -> Link:
    """The link of a preset's name or of a text, or the link itself.

    A bandwidth is a text such as "10Gbit" or "1GB/s": a `B` means bytes and a `b` bits, and
    prefixes are decimal, in either case. A latency may follow, as in "10Gbit, 50us".

    Raises:
      ValueError: If it is none of them.
    """
    if isinstance(value, Link):
        return value
    if value in LINKS:
        return LINKS[value]
    bandwidth, _, delay = (part.strip() for part in str(value).partition(","))
    lowered = bandwidth[:-3].lower() + bandwidth[-3:]
    lowered = lowered if lowered.endswith(("B/s", "Bps")) else lowered.lower()
    rate, latency = quantity(lowered, _RATES), quantity(delay, SECONDS) if delay else LATENCY
    if not (isinstance(value, str) and rate > 0 and latency >= 0):
        raise ValueError(
            '`link` must be a `perf.Link`, or a bandwidth such as "10Gbit", "200mbit", "1GB/s" or '
            f'"10Gbit, 50us", got {value!r}. Presets: {", ".join(LINKS)}.'
        )
    return Link(rate, latency, bandwidth, "given as text")


def to_device(value: Device | str) -> Device:
    """The device of a preset's name, or the device itself.

    Raises:
      ValueError: If there is no such preset.
    """
    if isinstance(value, Device):
        return value
    if value not in DEVICES:
        raise ValueError(
            f"`device` must be a `perf.Device` or a preset ({', '.join(DEVICES)}), got {value!r}."
        )
    return DEVICES[value]


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The links of a mesh and the codec times of its devices, from `perf.calibrate`.

    Attributes:
      links: `{axis: {primitive: Link}}`, fitted for each collective by itself.
      codecs: `{method: seconds per coordinate}` of encoding and decoding, in a whole update.
      device: The kind of the devices.
      jax_version: The version of JAX that was measured.
    """

    links: Mapping[str, Mapping[str, Link]]
    codecs: Mapping[str, float]
    device: str = ""
    jax_version: str = ""

    def link(self, axis: str, primitive: str) -> Link:
        """The fitted link of a collective over an axis.

        Raises:
          ValueError: If there is none.
        """
        if primitive not in self.links.get(axis, {}):
            known = ", ".join(sorted(self.links)) or "none"
            raise ValueError(
                f"`link` has no {primitive} over the axis {axis!r}; its axes: {known}."
            )
        return self.links[axis][primitive]

    def with_link(self, link: Link | str, axis_name: str = "data") -> "Calibration":
        """The same codecs, with one link for every collective over an axis.

        Codecs that were measured on one device have no link, since one device sends nothing.

        Args:
          link: A link, a bandwidth such as "10Gbit", or a preset's name.
          axis_name: The axis that sends over it.

        Returns:
          The calibration; other axes keep their links.

        Raises:
          ValueError: If the link has no bandwidth.

        Example:
          >>> from jaxcomm import perf
          >>> measured = perf.Calibration({}, {"mine": 1e-9}).with_link("10Gbit")
          >>> measured.link("data", "all_reduce").bytes_per_second
          1250000000.0
        """
        given = dict.fromkeys(PRIMITIVES, to_link(link))
        return dataclasses.replace(self, links={**self.links, axis_name: given})

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the calibration as JSON, whole or not at all.

        Raises:
          OSError: If the file cannot be written.
        """
        path = pathlib.Path(path)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        value = {"format": FORMAT, **dataclasses.asdict(self)}
        temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)

    def __str__(self) -> str:
        lines = [f"calibration of {self.device or 'a mesh'}, JAX {self.jax_version or 'unknown'}"]
        for axis, each in self.links.items():
            for primitive, link in each.items():
                wait, gigabits = 1e6 * link.latency, 8e-9 * link.bytes_per_second
                rate = f"{wait:9.1f} us per message  {gigabits:8.3f} Gbit/s"
                lines.append(f"  {axis}  {primitive:14}  {rate}")
        lines += [f"  {1e9 * s:8.3f} ns per coordinate  {name}" for name, s in self.codecs.items()]
        return "\n".join(lines)


def read_calibration(path: str | pathlib.Path) -> Calibration:
    """Reads the file that `Calibration.save` wrote.

    Args:
      path: The file.

    Returns:
      The calibration.

    Raises:
      OSError: If the file cannot be read.
      ValueError: If it is no calibration, is damaged, or has another format.

    Example:
      >>> import pathlib, tempfile
      >>> from jaxcomm import perf
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "links.json"
      >>> links = {"data": {"all_reduce": perf.Link(1e9)}}
      >>> perf.Calibration(links, {}).save(file)
      >>> perf.read_calibration(file).link("data", "all_reduce").bytes_per_second
      1000000000.0
    """
    try:
        value = json.loads(pathlib.Path(path).read_bytes())
        if value.pop("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}, which this release of jaxcomm reads")
        value["links"] = {
            axis: {
                name: Link(one["bytes_per_second"], one["latency"], f"{axis} {name}", "calibrated")
                for name, one in each.items()
            }
            for axis, each in value["links"].items()
        }
        for name, seconds in value["codecs"].items():
            require_number(seconds, name)
        return Calibration(**value)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no calibration, or is damaged: {error!s:.200}") from error
