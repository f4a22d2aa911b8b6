"""Which computation a compiled program schedules while its messages are on the way."""

from typing import Any, NamedTuple

from jaxcomm.wire._compiled import Instruction, Program, bytes_of
from jaxcomm.wire._messages import KINDS, messages_in
from jaxcomm.wire._program import table


class Overlap(NamedTuple):
    """One collective of a compiled program, and what is scheduled until its result is awaited.

    Attributes:
      kind: The collective, such as `"all_reduce"`.
      bytes: The bytes of its result, on one device.
      asynchronous: Whether the program has a start and a done.
      during: Seconds of backward computation between the two.
      remaining: Seconds of backward computation after the start, in the program; in a loop, until
        the end of the iteration.
      times: How often it runs at most: all branches of a conditional are listed.
    """

    kind: str
    bytes: float
    asynchronous: bool
    during: float
    remaining: float
    times: int

    @property
    def share(self) -> float:
        """The part of the remaining backward computation that may hide the message, 0 to 1."""
        return self.during / self.remaining if self.remaining else 0.0


class OverlapReport:
    """The collectives of a compiled program in the order of their starts; print it for a table."""

    def __init__(self, overlaps: tuple[Overlap, ...]):
        self.overlaps = overlaps

    @property
    def share(self) -> float:
        r"""The mean share of the remaining backward computation, weighted by bytes.

        .. math:: \sum_j b_j\, c_j / r_j \Big/ \sum_j b_j

        over all messages :math:`j` but the last one outside loops, which has nothing to hide
        behind. A message has :math:`b_j` bytes, and :math:`c_j` of the remaining :math:`r_j`
        seconds of computation before its result is awaited. One that starts when nothing remains
        counts as 0.
        """
        once = [number for number, each in enumerate(self.overlaps) if each.times == 1]
        early = [each for number, each in enumerate(self.overlaps) if number not in once[-1:]]
        total = sum(each.bytes * each.times for each in early)
        return sum(each.bytes * each.times * each.share for each in early) / total if total else 0.0

    def __str__(self) -> str:
        rows = [("collective", "bytes", "times", "form", "during", "remaining", "share")]
        rows += [
            (
                each.kind,
                f"{each.bytes:,.0f}",
                str(each.times),
                "start/done" if each.asynchronous else "synchronous",
                f"{each.during:.3g} s",
                f"{each.remaining:.3g} s",
                f"{each.share:.0%}",
            )
            for each in self.overlaps
        ]
        total = f"share of the remaining backward pass, by bytes: {self.share:.0%}"
        return "\n".join([*table(rows), total])

    __repr__ = __str__


def overlap_report(
    compiled: Any, *, flops_per_second: float = 4e14, bytes_per_second: float = 4e12
) -> OverlapReport:
    r"""Reports which backward computation a compiled step schedules during each collective.

    A program in which a collective has a start and a done computes between the two while the
    message is on the way. The seconds are a roofline estimate,

    .. math:: t = \max(\text{operations} / F,\ \text{bytes} / B),

    of the instructions that come from a backward pass. Nothing runs, so the devices for which the
    program was compiled need not exist.

    Args:
      compiled: A compiled step, `jax.jit(step).lower(...).compile()`, or its text.
      flops_per_second: :math:`F`; by default about that of an H200 for float32 products.
      bytes_per_second: :math:`B`; by default about that of the memory of an H200.

    Returns:
      The report; print it for a table. `share`, 0 to 1, is the part of the remaining backward
      computation that is scheduled during messages, weighted by their bytes. `overlaps` has one
      entry per collective, in the order of their starts: `kind`, such as `"all_reduce"`; `bytes` of
      its result on one device; `asynchronous`, whether it has a start and a done; `during` and
      `remaining`, the seconds of backward computation between the two and after the start; `times`,
      how often it runs at most; and its `share`.

    Raises:
      ValueError: If `compiled` is not a compiled program.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm import wire
      >>> compiled = jax.jit(jnp.sin).lower(jnp.zeros(3)).compile()
      >>> print(wire.overlap_report(compiled).share)
      0.0
    """
    as_text = getattr(compiled, "as_text", lambda: "")
    program = Program(compiled if isinstance(compiled, str) else as_text())

    def seconds(each: Instruction) -> float:
        if not each.is_backward:
            return 0.0
        cost = program.cost(each)
        return max(cost.flops / flops_per_second, cost.bytes / bytes_per_second)

    found: list[Overlap] = []
    for name, times in program.computations_that_run():
        instructions = program.computations[name]
        messages = messages_in(program, name)
        sending = {message.begin for message in messages}
        costs = [0.0 if i in sending else seconds(x) for i, x in enumerate(instructions)]
        for message in messages:
            after = message.begin + 1
            during, remaining = sum(costs[after : message.end]), sum(costs[after:])
            size = bytes_of(instructions[message.end].type)
            found.append(
                Overlap(
                    KINDS[message.opcode], size, message.is_asynchronous, during, remaining, times
                )
            )
    return OverlapReport(tuple(found))
