"""Known links and devices, each with its source. Nominal figures are upper bounds."""

import dataclasses
from collections.abc import Mapping

from jaxcomm.perf._link import LATENCY, Link

_LINE_RATE = "nominal line rate; the latency is an assumption for TCP"
_QSGD = "measured by Xin et al. 2023, arXiv 2305.18627; the latency is an assumption"

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
"""Links by name."""


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


_DATASHEET = "nominal, the vendor's data sheet"

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
"""Devices by name."""


def to_device(value: Device | str) -> Device:
    """The device of a preset's name, or the device itself.

    Raises:
      ValueError: If there is no such preset.
    """
    if isinstance(value, Device):
        return value
    if not isinstance(value, str) or value not in DEVICES:
        raise ValueError(
            f"`device` must be a `perf.Device` or a preset ({', '.join(DEVICES)}), got {value!r}."
        )
    return DEVICES[value]
