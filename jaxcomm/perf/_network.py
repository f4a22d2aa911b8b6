"""The seconds that the collectives of an account take, each on the link of its axis."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from jaxcomm.perf._calibration import Calibration
from jaxcomm.perf._link import Link, to_link
from jaxcomm.perf._presets import LINKS
from jaxcomm.perf._require import require_share
from jaxcomm.wire import Account, Collective

LinkLike: TypeAlias = Link | str | Calibration | Mapping[str, Link | str]
"""One link for all axes, links by axis, or a calibration."""

LinkOf: TypeAlias = Callable[[Collective], Link]
"""The link that a collective runs on."""


def _seconds(link: Link, collective: Collective) -> float:
    return collective.messages * link.latency + collective.bytes_per_worker / link.bytes_per_second


def links_of(link: LinkLike) -> LinkOf:
    """Returns the link of each collective; of several axes, the slowest.

    Raises:
      ValueError: If `link` is no link; when used, if an axis has no link.
    """
    if isinstance(link, Calibration):
        calibrated = link

        def of_axis(axis: str, collective: Collective) -> Link:
            return calibrated.link(axis, collective.primitive)
    elif isinstance(link, Mapping):
        by_axis = {axis: to_link(each, LINKS) for axis, each in link.items()}

        def of_axis(axis: str, collective: Collective) -> Link:
            if axis not in by_axis:
                raise ValueError(
                    f"`link` has no link for the axis {axis!r}, only for {sorted(by_axis)}."
                )
            return by_axis[axis]
    else:
        only = to_link(link, LINKS)

        def of_axis(axis: str, collective: Collective) -> Link:
            return only

    def of(collective: Collective) -> Link:
        links = [of_axis(axis, collective) for axis in collective.axes]
        return max(links, key=lambda each: _seconds(each, collective))

    return of


def network_seconds(account: Account, link_of: LinkOf, share: float = 1.0) -> float:
    """The seconds of all messages, one after another.

    Args:
      account: What is sent.
      link_of: The link of each collective.
      share: The fraction of the steps in which conditionals take their heaviest branch.

    Raises:
      ValueError: If a loop of unknown length sends, or `share` is out of range.
    """
    require_share(share, "share")
    if account.unbounded:
        raise ValueError(
            "A loop of unknown length sends in each iteration, so the time is unknown: give the "
            "loop a fixed length."
        )

    def cost(collectives: list[Collective]) -> float:
        sending = [each for each in collectives if each.workers > 1]
        # Compilers combine the collectives of a group: one latency, all bytes.
        waits = {c.group: c.messages * link_of(c).latency for c in sending}
        return sum(waits.values()) + sum(
            c.bytes_per_worker / link_of(c).bytes_per_second for c in sending
        )

    heaviest = cost(account.heaviest(cost))
    if share == 1:
        return heaviest
    lightest = cost(account.heaviest(lambda collectives: -cost(collectives)))
    return share * heaviest + (1 - share) * lightest
