"""The ranked table of methods."""

import dataclasses
import math

from jaxcomm.perf import Prediction

NEAR = 1.05
"""Within this factor of the best, the method that is assumed to need fewer steps wins."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A method of the table.

    Attributes:
      code: The transformation that is predicted.
      paste: The same after the exact steps with which the records began, if they did: what to put
        before the optimizer in `optax.chain`.
      prediction: The predicted step.
      state_bytes: The memory of the method's state on one worker.
      steps: The factor on the number of steps that the ranking assumes; None if the method is
        never recommended.
      risk: What is given up.
      overlaps: Whether the ranking has the time with overlap.
    """

    code: str
    paste: str
    prediction: Prediction
    state_bytes: float
    steps: float | None
    risk: str
    overlaps: bool

    @property
    def cost(self) -> float:
        """The seconds of a step times the assumed factor on the steps."""
        own = self.prediction.overlapped if self.overlaps else self.prediction.seconds
        return math.inf if self.steps is None else own * self.steps


@dataclasses.dataclass(frozen=True)
class Advice:
    """What :func:`jaxcomm.advise` returns; print it.

    Attributes:
      rows: The methods, by seconds per step times the assumed factor on the number of steps.
      assumptions: What the predictions assume, a line each.
    """

    rows: tuple[Row, ...]
    assumptions: tuple[str, ...]

    @property
    def recommended(self) -> Row:
        """The row with the fewest assumed steps among those within 5 % of the first."""
        near = [row for row in self.rows if row.cost <= NEAR * self.rows[0].cost]
        return min(near, key=lambda row: (row.steps or math.inf, row.cost))

    @property
    def compress(self) -> bool:
        """Whether the recommendation is neither exact nor rounds to 16 bits."""
        return not self.recommended.overlaps

    @property
    def line(self) -> str:
        """The line of code to paste."""
        return f"tx = optax.chain({self.recommended.paste}, optimizer)"

    def _verdict(self) -> str:
        best = self.recommended
        exact = next(row for row in self.rows if row.steps == 1)
        if not self.compress:
            return "Do not compress" + ("." if best is exact else " further than to 16 bits.")
        gain = exact.cost / best.cost
        return f"Compress: {gain:.2f} x as fast as the exact mean, with overlap and assumed steps."

    def __str__(self) -> str:
        header = ("", "ms/step", "overlap", "MB sent", "MB state", "steps x", "risk", "method")
        cells = [header]
        for row in self.rows:
            seen = row.prediction
            cells.append(
                (
                    "->" if row is self.recommended else "",
                    f"{1e3 * seen.seconds:,.1f}",
                    f"{1e3 * seen.overlapped:,.1f}",
                    f"{1e-6 * seen.bytes_per_worker:,.1f}",
                    f"{1e-6 * row.state_bytes:,.1f}",
                    "?" if row.steps is None else f"{row.steps:g}",
                    row.risk.partition(":")[0],
                    row.code,
                )
            )
        widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells]
        return "\n".join(
            [
                *(line.rstrip() for line in lines),
                "",
                *self.assumptions,
                f"Risk: {self.recommended.risk}.",
                f"Error: {self.recommended.prediction.error}.",
                self._verdict(),
                self.line,
            ]
        )
