"""What plans and timelines start from: seconds and bytes of each layer, and a link."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

_Bytes = TypeVar("_Bytes", float, np.ndarray)


def require_number(
    value: object, option: str, least: float = 0.0, *, strict: bool = False
) -> float:
    """Returns a finite number as a float.

    Raises:
      ValueError: If it is no finite number of at least `least`, or above it if `strict`.
    """
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    most = sys.float_info.max  # `math.isfinite` raises for an int beyond floats.
    if not (is_number and least <= value <= most) or (strict and value == least):  # type: ignore[operator]
        bound = f"above {least:g}" if strict else f"of at least {least:g}"
        raise ValueError(f"`{option}` must be a finite number {bound}, got {value!r}.")
    return float(value)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class AlphaBeta:
    r"""The model of a link: a message of :math:`s` bytes takes :math:`\alpha + \beta s` seconds.

    :math:`\alpha` is the latency, and :math:`1 / \beta` the bandwidth. The link carries one message
    at a time. Both numbers belong to the whole collective: with all workers, and with what the
    library adds. A linear regression of measured times on bytes gives them.

    Attributes:
      latency: :math:`\alpha` in seconds.
      bytes_per_second: :math:`1 / \beta`; it may be infinite.

    Raises:
      ValueError: If the latency is negative, or the bandwidth is not positive.

    Example:
      >>> from jaxcomm import scheduling
      >>> link = scheduling.AlphaBeta(latency=1e-3, bytes_per_second=1e9)
      >>> link.seconds(4e6)
      0.005
    """

    latency: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        require_number(self.latency, "latency")
        if self.bytes_per_second != math.inf:
            require_number(self.bytes_per_second, "bytes_per_second", strict=True)

    def seconds(self, size: _Bytes) -> _Bytes:
        """The seconds of a message of `size` bytes, or of each of several."""
        return self.latency + size / self.bytes_per_second


def ring_link(workers: int, *, latency: float, bytes_per_second: float) -> AlphaBeta:
    r"""The link of a ring all-reduce whose hops have a latency and a bandwidth.

    .. math:: \alpha + \beta s = 2 (n - 1) \left( a + \frac{s}{n b} \right)

    for :math:`n` workers, latency :math:`a` and bandwidth :math:`b` of a hop, and :math:`s` bytes
    that are summed. The workers add in no time.

    Args:
      workers: The number of workers, at least 2.
      latency: Seconds of a hop, besides those of its bytes.
      bytes_per_second: The bandwidth of each worker in one direction.

    Returns:
      A link for the bytes of the summed arrays. For the bytes that a worker *sends*, which
      :func:`jaxcomm.wire.account` counts, use `AlphaBeta` with the bandwidth of the worker.

    Raises:
      ValueError: If an argument is out of range.

    Example:
      >>> from jaxcomm import scheduling
      >>> link = scheduling.ring_link(4, latency=1e-5, bytes_per_second=1e9)
      >>> round(link.latency, 7), round(link.bytes_per_second)
      (6e-05, 666666667)

    References:
      Patarasuk, Yuan: *Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations*, 2009.
    """
    hops = 2 * (workers - 1)
    return AlphaBeta(hops * latency, bytes_per_second * workers / hops)


@dataclasses.dataclass(frozen=True)
class LayerTimes:
    """The bytes and the seconds of each layer, in backward order: the last layer comes first.

    A layer is whatever is sent as a whole: a leaf, or the leaves of a block. Seconds are those of
    one worker. Several layers in one message take the sum of their seconds to encode and decode,
    since codecs encode each leaf separately.

    Attributes:
      sizes: The bytes that a layer sends, above 0.
      backward: The seconds of its backward pass; 0 for a leaf whose layer has another leaf.
      encode: The seconds to encode it; all 0 by default.
      decode: The seconds to decode its mean, and to update it; all 0 by default.
      forward: The seconds of its forward pass; all 0 by default.
      names: Names for events and pictures; by default `layer0` for the *first* layer of the model.

    Raises:
      ValueError: If a number is negative or not finite, or the lengths differ.

    Example:
      >>> from jaxcomm import scheduling
      >>> times = scheduling.LayerTimes(sizes=[8e6, 4e6], backward=[2e-3, 1e-3])
      >>> times.names, len(times), times.encode
      (('layer1', 'layer0'), 2, (0.0, 0.0))
    """

    sizes: Sequence[float]
    backward: Sequence[float]
    encode: Sequence[float] = ()
    decode: Sequence[float] = ()
    forward: Sequence[float] = ()
    names: Sequence[str] = ()

    def __post_init__(self) -> None:
        count = len(self.sizes)
        names = tuple(self.names) or tuple(f"layer{count - 1 - i}" for i in range(count))
        object.__setattr__(self, "names", names)
        for field in ("sizes", "backward", "encode", "decode", "forward"):
            found = tuple(map(float, getattr(self, field))) or (0.0,) * count
            if len(found) != count or not all(0 <= x < math.inf for x in found):
                raise ValueError(f"`{field}` must have a finite number per layer, got {found}.")
            object.__setattr__(self, field, found)

    def __len__(self) -> int:
        return len(self.sizes)


def ready_seconds(times: LayerTimes) -> np.ndarray:
    """When the first k layers are encoded, for k = 0, 1, ..., if nothing stops the backward pass.

    A group is encoded after the backward pass of its last layer; so the sum does not depend on the
    groups.
    """
    each = np.add(times.backward, times.encode)
    return np.concatenate([[0.0], np.cumsum(each)])
