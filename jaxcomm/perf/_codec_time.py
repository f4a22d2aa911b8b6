"""The seconds of encoding and decoding, from the bytes that they move through memory."""

import math

from jaxcomm.perf._presets import Device
from jaxcomm.wire import Account, Collective

EFFICIENCY = 0.25
"""The share of the memory's bandwidth that a codec is assumed to reach."""


def _payload(collectives: list[Collective]) -> float:
    return sum(c.times * math.prod(c.shape) * c.dtype.itemsize for c in collectives)


def _sent(collectives: list[Collective]) -> float:
    return sum(c.bytes_per_worker for c in collectives)


def roofline_seconds(
    account: Account, gradient_bytes: float, state_bytes: float, device: Device
) -> float:
    r"""The seconds of a codec that is limited by memory, at a quarter of the bandwidth.

    .. math:: \frac{2 G + 2 M + 2 P + R}{\text{bandwidth} / 4}

    Gradients (G) and the codec's state (M) are read and written once, what is sent (P) is written
    and read, and what is received (R, as many bytes as a
    worker sends) is read. If as much is sent as the gradients have, nothing is
    encoded, and the time is 0. Sorting and matrix products are not modeled: calibrate instead.

    Args:
      account: What is sent.
      gradient_bytes: The bytes of the gradients.
      state_bytes: The bytes of the codec's state.
      device: The device with the memory.
    """
    sent = account.heaviest(_sent)
    payload = _payload(sent)
    if payload >= gradient_bytes:
        return 0.0
    received = _sent(sent)
    moved = 2 * gradient_bytes + 2 * state_bytes + 2 * payload + received
    return moved / (EFFICIENCY * device.memory_bytes_per_second)
