"""What the rows of a run add up to."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from jaxcomm.asynchronous._messages import Row


@dataclasses.dataclass
class Summary:
    """Counts of a run; they change with :meth:`add`.

    Attributes:
      seconds: Since the beginning.
      used: Messages that changed the parameters, or will.
      stale: Messages that the policy has dropped, since they came too late.
      nonfinite: Messages that were dropped, since something in them was NaN or infinite.
      lost: Orders whose worker left; their examples were dealt again.
      examples: The examples of the messages in `used`.
      upload_bytes: To the owner.
      download_bytes: From the owner.
      work_seconds: What workers computed for messages in `used`, added up.
      alive: The workers that take part.
      deaths: How often a worker left, and its memory was dropped.
      undone: Messages that had been used after the checkpoint at which the owner began again. Those
        of the last moments before its death, of which the program had no rows yet, are not counted.
      restarts: How often the owner began again at a checkpoint.
      loss: The mean of the last 20 messages.
      staleness: The mean of the last 20 messages.
    """

    workers: int
    seconds: float = 0.0
    used: int = 0
    stale: int = 0
    nonfinite: int = 0
    lost: int = 0
    examples: int = 0
    upload_bytes: int = 0
    download_bytes: int = 0
    work_seconds: float = 0.0
    alive: set[int] = dataclasses.field(default_factory=set)
    deaths: int = 0
    undone: int = 0
    restarts: int = 0
    loss: float = float("nan")
    staleness: float = float("nan")
    _last: list[Row] = dataclasses.field(default_factory=list, repr=False)

    @property
    def goodput(self) -> float:
        """The share of the workers' time in which they computed what was used."""
        return self.work_seconds / max(self.seconds * self.workers, 1e-9)

    def add(self, rows: Iterable[Row]) -> None:
        """Counts more rows."""
        for row in rows:
            self.seconds = row.seconds
            if row.kind == "joined":
                self.alive.add(row.worker)
            elif row.kind == "left":
                self.alive.discard(row.worker)
                self.deaths += 1
                self.lost += row.outcome == "lost"
                self.download_bytes += row.download_bytes
            elif row.kind == "restored":
                self.alive.clear()
                self.restarts += 1
            elif row.kind == "arrived":
                self.used += row.outcome == "used"
                self.stale += row.outcome == "stale"
                self.nonfinite += row.outcome == "nonfinite"
                self.upload_bytes += row.upload_bytes
                self.download_bytes += row.download_bytes
                if row.outcome == "used":
                    self.examples += row.examples
                    self.work_seconds += row.work_seconds
                    self._last = [*self._last[-19:], row]
        if self._last:
            self.loss = float(np.mean([row.loss for row in self._last]))
            self.staleness = float(np.mean([row.staleness for row in self._last]))

    def __str__(self) -> str:
        dropped = self.stale + self.nonfinite
        return (
            f"{self.seconds:.0f} s: {self.used} updates, {self.examples} examples, "
            f"loss {self.loss:.4g}, staleness {self.staleness:.1f}, {dropped} dropped, "
            f"{self.lost + self.undone} lost, up {self.upload_bytes / 1e6:.1f} MB, "
            f"down {self.download_bytes / 1e6:.1f} MB, goodput {self.goodput:.0%}, "
            f"{len(self.alive)} of {self.workers} workers alive"
        )
