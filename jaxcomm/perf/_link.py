"""A link: seconds per message and bytes per second, with the source of both."""

import dataclasses
import re
from collections.abc import Mapping

from jaxcomm.perf._require import is_number, require_positive

LATENCY = 50e-6
"""Seconds per message of a link that is given by its bandwidth alone: Ethernet with TCP."""

_BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_BANDWIDTH = re.compile(
    r"([0-9.]{1,20}(?:e[0-9]{1,2})?) ?([kmgt]?)(bit/s|bits|bit|bps|b/s|Bps|B/s)"
)
_LATENCY = re.compile(r"([0-9.]{1,20}(?:e-?[0-9]{1,2})?) ?(s|ms|us|µs|ns)")
_FORMS = 'such as "10Gbit", "200mbit", "1GB/s" or "10Gbit, 50us"'


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
        if not (is_number(self.bytes_per_second) and self.bytes_per_second > 0):
            raise ValueError(
                f"`bytes_per_second` of the link {self.name!r} must be positive and finite, got "
                f"{self.bytes_per_second!r}: a link needs a bandwidth."
            )
        if not (is_number(self.latency) and self.latency >= 0):
            raise ValueError(
                f"`latency` of the link {self.name!r} must be seconds of at least 0, got "
                f"{self.latency!r}."
            )

    def __str__(self) -> str:
        return (
            f"{self.name}: {8e-9 * self.bytes_per_second:.3g} Gbit/s, "
            f"{1e6 * self.latency:.3g} us per message ({self.source})"
        )


def parse_link(text: str) -> Link:
    """Reads a bandwidth, and a latency after a comma.

    Args:
      text: A bandwidth such as "10Gbit" or "1GB/s": a `B` means bytes and a `b` bits, and prefixes
        are decimal, in either case. A latency may follow, as in "10Gbit, 50us".

    Returns:
      The link. Without a latency it has 50 microseconds per message.

    Raises:
      ValueError: If the text is not of this form, or lacks the bandwidth.

    Example:
      >>> from jaxcomm import perf
      >>> perf.parse_link("200mbit, 1ms")
      Link(bytes_per_second=25000000.0, latency=0.001, name='200mbit', source='given as text')
    """
    bandwidth, _, delay = (part.strip() for part in text.partition(","))
    # A capital B means bytes, a small one bits; the case of the prefix does not matter.
    lowered = bandwidth[:-3].lower() + bandwidth[-3:]
    lowered = lowered if lowered.endswith(("B/s", "Bps")) else lowered.lower()
    rate, waits = _BANDWIDTH.fullmatch(lowered), _LATENCY.fullmatch(delay)
    if not rate or (delay and not waits):
        raise ValueError(f"`link` must be a bandwidth {_FORMS}, or a preset, got {text!r}.")
    try:
        bits = float(rate[1]) * _BITS[rate[2]] * (8 if "B" in rate[3] else 1)
        latency = float(waits[1]) * _SECONDS[waits[2]] if waits else LATENCY
    except ValueError as error:
        raise ValueError(f"`link` has a number that cannot be read, got {text!r}.") from error
    return Link(bits / 8, latency, bandwidth, "given as text")


def to_seconds(value: object, option: str) -> float:
    """A duration: seconds, as a number or text, or text with a unit, such as "300ms".

    Raises:
      ValueError: If it is no duration, or not above 0.
    """
    seconds = value
    if isinstance(value, str):
        text = value.strip()
        found = _LATENCY.fullmatch(text)
        try:
            seconds = float(found[1]) * _SECONDS[found[2]] if found else float(text)
        except ValueError:
            raise ValueError(
                f'`{option}` must be a duration, such as 0.3 or "300ms", got {value!r}.'
            ) from None
    require_positive(seconds, option)
    return float(seconds)  # type: ignore[arg-type]


def to_link(value: Link | str, presets: Mapping[str, Link]) -> Link:
    """The link of a preset's name or of a text, or the link itself.

    Raises:
      ValueError: If it is none of them.
    """
    if isinstance(value, Link):
        return value
    if not isinstance(value, str):
        raise ValueError(f"`link` must be a `perf.Link` or a bandwidth {_FORMS}, got {value!r}.")
    if value in presets:
        return presets[value]
    try:
        return parse_link(value)
    except ValueError as error:
        raise ValueError(f"{str(error)[:-1]}. Presets: {', '.join(presets)}.") from error
