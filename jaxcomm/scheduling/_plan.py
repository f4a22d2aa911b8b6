"""A plan says which layers a message has, into how many parts it is cut, and which goes first."""

from __future__ import annotations

from typing import NamedTuple

from jaxcomm.scheduling._times import LayerTimes, require_number, require_times


class Plan(NamedTuple):
    """Which layers travel in one message, and in which order.

    Layers are positions in the :class:`LayerTimes` of the plan, so in backward order.

    Attributes:
      groups: The layers of each message. A message is ready when its layers are encoded.
      sizes: The bytes that each layer sends.
      parts: Into how many equal parts each message is cut; the link may change to another message
        between two parts.
      priorities: A number per message: of the messages that are ready, the link takes the one with
        the smallest. Among equal ones it takes the one that was ready first.
      ratios: The fraction of the coordinates that each layer sends.
      overlap: Whether a message may be sent during the backward pass, or all wait for its end.
      barrier: Whether the next forward pass waits for all layers, or each layer for its own.
    """

    groups: tuple[tuple[int, ...], ...]
    sizes: tuple[float, ...]
    parts: tuple[int, ...]
    priorities: tuple[int, ...]
    ratios: tuple[float, ...]
    overlap: bool = True
    barrier: bool = True

    @property
    def messages(self) -> int:
        """The number of messages of a step; each part is one."""
        return sum(self.parts)

    def named(self, times: LayerTimes) -> tuple[tuple[str, ...], ...]:
        """The groups by the names of their layers, for the `plan` of :func:`wait_free`."""
        names = require_times(times).names
        return tuple(tuple(names[layer] for layer in group) for group in self.groups)

    def message_bytes(self, group: int) -> float:
        """The bytes of a group, in all of its parts."""
        return sum(self.sizes[layer] for layer in self.groups[group])


def dense_plan(times: LayerTimes, groups: tuple[tuple[int, ...], ...]) -> Plan:
    """A plan that sends whole layers in groups, first come, first served."""
    ones = (1,) * len(groups)
    return Plan(groups, tuple(times.sizes), ones, (0,) * len(groups), (1.0,) * len(times))


def contiguous(starts: list[int], count: int) -> tuple[tuple[int, ...], ...]:
    """The groups of consecutive layers that begin at `starts`."""
    ends = [*starts[1:], count]
    return tuple(tuple(range(a, b)) for a, b in zip(starts, ends, strict=True))


def require_plan(plan: object, times: LayerTimes) -> Plan:
    """Returns the plan.

    Raises:
      ValueError: If it is no plan for these layers.
    """
    if not isinstance(plan, Plan):
        raise ValueError(
            f"`plan` must be a plan, such as `scheduling.merge_plan(times, link)`, got {plan!r}."
        )
    layers = sorted(layer for group in plan.groups for layer in group)
    if layers != [*range(len(times))] or not all(plan.groups):
        raise ValueError(
            f"`plan.groups` must have each of {len(times)} layers exactly once, got {plan.groups}: "
            "make the plan from the same `times`."
        )
    wanted = {"sizes": len(times), "ratios": len(times)}
    wanted |= dict.fromkeys(("parts", "priorities"), len(plan.groups))
    for field, length in wanted.items():
        if len(getattr(plan, field)) != length:
            raise ValueError(
                f"`plan.{field}` must have {length} entries, got {len(getattr(plan, field))}."
            )
    for group, parts in enumerate(plan.parts):
        if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
            raise ValueError(
                f"`plan.parts[{group}]` must be an integer of at least 1, got {parts}."
            )
    for layer, size in enumerate(plan.sizes):
        require_number(size, f"plan.sizes[{layer}]", strict=True)
    return plan


def wait_free_plan(times: LayerTimes) -> Plan:
    """One message per layer, sent as soon as the layer is encoded: wait-free backpropagation.

    Args:
      times: The layers.

    Returns:
      A plan with a message per layer, first come, first served.

    Raises:
      ValueError: If `times` is no :class:`LayerTimes`.

    Example:
      >>> from jaxcomm import scheduling
      >>> times = scheduling.LayerTimes(sizes=[8e6, 4e6], backward=[2e-3, 1e-3])
      >>> scheduling.wait_free_plan(times).groups
      ((0,), (1,))

    References:
      Zhang et al., `Poseidon: An Efficient Communication Architecture for Distributed Deep Learning
      on GPU Clusters <https://arxiv.org/abs/1706.03292>`_, 2017.
    """
    return dense_plan(times, tuple((layer,) for layer in range(len(require_times(times)))))


def at_end_plan(times: LayerTimes, *, bucket: bool = True) -> Plan:
    """All layers after the backward pass, which no message overlaps.

    Args:
      times: The layers.
      bucket: Whether they travel in one message, or each in its own.

    Returns:
      A plan without overlap.

    Raises:
      ValueError: If `times` is no :class:`LayerTimes`.

    Example:
      >>> from jaxcomm import scheduling
      >>> times = scheduling.LayerTimes(sizes=[8e6, 4e6], backward=[2e-3, 1e-3])
      >>> scheduling.at_end_plan(times).groups
      ((0, 1),)
    """
    count = len(require_times(times))
    groups = (tuple(range(count)),) if bucket else tuple((layer,) for layer in range(count))
    return dense_plan(times, groups)._replace(overlap=False)


def bucket_plan(times: LayerTimes, *, bucket_bytes: float = 25 * 2**20) -> Plan:
    """Buckets of consecutive layers, each closed when it has a number of bytes.

    Args:
      times: The layers.
      bucket_bytes: A bucket takes layers until it has at least as many bytes.

    Returns:
      A plan with a message per bucket, first come, first served.

    Raises:
      ValueError: If `times` is no :class:`LayerTimes`, or `bucket_bytes` is not above 0.

    Example:
      >>> from jaxcomm import scheduling
      >>> times = scheduling.LayerTimes(sizes=[8e6, 4e6, 1e6], backward=[2e-3, 1e-3, 1e-3])
      >>> scheduling.bucket_plan(times, bucket_bytes=10e6).groups
      ((0, 1), (2,))

    References:
      Li et al., `PyTorch Distributed: Experiences on Accelerating Data Parallel Training
      <https://arxiv.org/abs/2006.15704>`_, 2020. Its first bucket is smaller; ours are equal.
    """
    require_times(times)
    limit = require_number(bucket_bytes, "bucket_bytes", strict=True)
    starts, held = [0], 0.0
    for layer, size in enumerate(times.sizes):
        if held >= limit:
            starts.append(layer)
            held = 0.0
        held += size
    return dense_plan(times, contiguous(starts, len(times)))
