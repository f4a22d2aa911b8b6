"""A clock that goes through the rows of a run again, with its workers in this process."""

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxcomm._contract import PyTree
from jaxcomm.asynchronous._messages import Happening, Job, Order, Report, Row
from jaxcomm.asynchronous._worker import Programs, Worker


class Replay:
    """The clock of a run that has been recorded."""

    def __init__(self, job: Job, rows: Iterable[Row | None]) -> None:
        self._programs, self._rows = Programs(job), iter(rows)
        self._workers: dict[int, Any] = {}
        self._orders: dict[int, Order] = {}
        self._views: dict[tuple[int, int], PyTree] = {}

    def seconds(self) -> float:
        """Nothing is saved."""
        return 0.0

    def resume(self, seconds: float) -> None:
        """Nothing: rows have times."""

    def start(self, worker: int) -> None:
        """Nothing: the rows say when it joins."""

    def begin(self, worker: int, order: Order) -> None:
        """Keeps the order until the row of its arrival."""
        self._orders[worker] = order

    def hear(self, worker: int, version: int, view: PyTree) -> None:
        """Keeps the view until the row that heard it."""
        self._views[worker, version] = view

    def next(self, due: float) -> Happening:
        """The next row happens again."""
        row = next(self._rows, None)
        if row is None:
            return Happening("stopped", np.float32(0))
        happening = Happening(row.kind, np.float32(row.seconds), row.worker, reason=row.reason)
        if row.kind == "joined":
            self._workers[row.worker] = self.worker(row.worker)
        return happening if row.kind != "arrived" else happening._replace(report=self.run(row))

    def worker(self, index: int) -> Any:
        """A worker that joins."""
        return Worker(self._programs, index)

    def run(self, row: Row) -> Report:
        """Computes what arrives with a row."""
        news = functools.partial(self.news, row)
        report: Report = self._workers[row.worker].run(self._orders[row.worker], news)
        return report

    def news(self, row: Row, number: int) -> tuple[int, PyTree] | None:
        """The view that a worker heard before a gradient."""
        version = dict(row.heard).get(number)
        return None if version is None else (version, self._views[row.worker, version])
