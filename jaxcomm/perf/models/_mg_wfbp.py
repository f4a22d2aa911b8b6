"""The model of MG-WFBP: the seconds of an all-reduce are affine in its bytes."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxcomm.perf._require import require_at_least


class AffineCost(NamedTuple):
    r"""The seconds :math:`t(s) = a + b s` of a whole all-reduce of :math:`s` bytes.

    Attributes:
      a: Seconds per all-reduce.
      b: Seconds per byte.
    """

    a: float
    b: float

    def seconds(self, size: float) -> float:
        """The seconds of an all-reduce of `size` bytes.

        Raises:
          ValueError: If `size` is negative.
        """
        require_at_least(0, size, "size")
        return self.a + self.b * size

    def saved_by_merging(self, messages: int) -> float:
        """The seconds on the link that one all-reduce saves over `messages` of the same bytes.

        Raises:
          ValueError: If `messages` is below 1.
        """
        require_at_least(1, messages, "messages")
        return (messages - 1) * self.a


MG_WFBP_10GBE = AffineCost(9.08e-4, 7.4e-10)
"""16 nodes, 10 Gbit/s Ethernet, fitted by the authors.

In a ring, `b` would be 2.5 GB/s sent by each worker: twice what the link can carry.
"""

MG_WFBP_56GB = AffineCost(2.36e-4, 4.06e-10)
"""16 nodes, 56 Gbit/s InfiniBand, fitted by the authors."""


def wait_free_seconds(
    backward_seconds: Sequence[float], sizes: Sequence[float], cost: AffineCost
) -> float:
    r"""Returns the seconds of a backward pass that sends each layer when its gradient is done.

    A layer is sent when its gradient is done and the layer before it has been sent:

    .. math:: c_i = \max(c_{i-1} + t_{i-1},\; \textstyle\sum_{j \le i} b_j), \qquad
              T = c_L + t_L

    Args:
      backward_seconds: :math:`b_i`, seconds of each layer, in the order of the backward pass.
      sizes: Bytes of each layer's gradient, in the same order.
      cost: The seconds :math:`t_i` of an all-reduce of those bytes.

    Returns:
      Seconds from the start of the backward pass to the end of the last all-reduce.

    Raises:
      ValueError: If the lengths differ, there is no layer, or a number is negative.

    References:
      Shi, Chu, Li: MG-WFBP, 2018, arXiv 1811.11141.

    Example:
      >>> from jaxcomm.perf import models
      >>> models.wait_free_seconds([1.0, 1.0], [4.0, 4.0], models.AffineCost(0.5, 0.25))
      4.0
    """
    if len(backward_seconds) != len(sizes) or not sizes:
        raise ValueError(
            "`backward_seconds` and `sizes` must have one number per layer, got "
            f"{len(backward_seconds)} and {len(sizes)}."
        )
    computed = sent = 0.0
    for seconds, size in zip(backward_seconds, sizes, strict=True):
        require_at_least(0, seconds, "backward_seconds")
        computed += seconds
        sent = max(sent, computed) + cost.seconds(size)
    return sent
