"""What was measured on a mesh, and its file."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxcomm.perf._link import Link, to_link
from jaxcomm.perf._presets import LINKS
from jaxcomm.perf._require import require_at_least

FORMAT = 1
"""The format that this release writes and reads."""

MOST_BYTES = 2**20
PRIMITIVES = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "ppermute")
_MOST_NAMES = 1000  # Axes and methods of a file.
_MOST_SHOWN = 200  # Characters of a reason.


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
          ValueError: If it was not measured.
        """
        if axis not in self.links:
            raise ValueError(
                f"The calibration has no axis {axis!r}, only {sorted(self.links)}: calibrate on "
                "the mesh that trains."
            )
        if primitive not in self.links[axis]:
            raise ValueError(f"The calibration has no {primitive} over the axis {axis!r}.")
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
        given = dict.fromkeys(PRIMITIVES, to_link(link, LINKS))
        return dataclasses.replace(self, links={**self.links, axis_name: given})

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the calibration as JSON, whole or not at all.

        Raises:
          OSError: If the file cannot be written.
        """
        path = pathlib.Path(path)
        links = {
            axis: {
                name: {"latency": one.latency, "bytes_per_second": one.bytes_per_second}
                for name, one in each.items()
            }
            for axis, each in self.links.items()
        }
        value = {
            "format": FORMAT,
            "device": self.device,
            "jax_version": self.jax_version,
            "links": links,
            "codecs": dict(self.codecs),
        }
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)

    def __str__(self) -> str:
        lines = [f"calibration of {self.device or 'a mesh'}, JAX {self.jax_version or 'unknown'}"]
        for axis, each in self.links.items():
            for primitive, link in each.items():
                lines.append(
                    f"  {axis}  {primitive:14}  {1e6 * link.latency:9.1f} us per message  "
                    f"{8e-9 * link.bytes_per_second:8.3f} Gbit/s"
                )
        for name, seconds in self.codecs.items():
            lines.append(f"  {1e9 * seconds:8.3f} ns per coordinate  {name}")
        return "\n".join(lines)


def read_calibration(path: str | pathlib.Path) -> Calibration:
    """Reads the file that `Calibration.save` wrote.

    Args:
      path: The file.

    Returns:
      The calibration.

    Raises:
      OSError: If the file cannot be read.
      ValueError: If it is no calibration, is damaged, is larger than 1 MiB, or has a newer format.

    Example:
      >>> import pathlib, tempfile
      >>> from jaxcomm import perf
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "links.json"
      >>> links = {"data": {"all_reduce": perf.Link(1e9)}}
      >>> perf.Calibration(links, {}).save(file)
      >>> perf.read_calibration(file).link("data", "all_reduce").bytes_per_second
      1000000000.0
    """
    with open(path, "rb") as file:
        raw = file.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise ValueError(f"{path} is no calibration: it has more than {MOST_BYTES} bytes.")
    try:
        value = json.loads(raw)
    except (RecursionError, ValueError) as error:  # Of the decoder, or of a long number.
        raise ValueError(f"{path} is no calibration: it is not JSON.") from error
    try:
        return _from_json(value)
    except (AttributeError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(f"{path} is damaged: it lacks or mistypes a field.") from error
    except ValueError as error:
        shown = " ".join(str(error)[:_MOST_SHOWN].split())
        raise ValueError(f"{path} is no calibration, or damaged: {shown}") from error


def _from_json(value: Any) -> Calibration:
    number = value.get("format") if isinstance(value, dict) else None
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError("it has no format.")
    if number > FORMAT:
        raise ValueError(
            f"it has format {number}, and this release reads format {FORMAT}: install a newer "
            "jaxcomm."
        )
    axes, codecs = value["links"], value["codecs"]
    if len(axes) > _MOST_NAMES or len(codecs) > _MOST_NAMES:
        raise ValueError(f"it has more than {_MOST_NAMES} axes or methods.")
    links: dict[str, dict[str, Link]] = {}
    for axis, each in axes.items():
        if not set(each) <= set(PRIMITIVES):
            raise ValueError(f"it has collectives beside {PRIMITIVES}.")
        links[axis] = {
            name: Link(one["bytes_per_second"], one["latency"], f"{axis} {name}", "calibrated")
            for name, one in each.items()
        }
    for name, seconds in codecs.items():
        require_at_least(0, seconds, name)
    texts = (value["device"], value["jax_version"])
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("`device` and `jax_version` must be texts.")
    return Calibration(links, dict(codecs), *texts)
