"""A part whose measurements end in every way: `python -m tests.pallas_kernels.dying_part`."""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from pallas_kernels.benchmark.candidates import Session
from pallas_kernels.benchmark.parts import Result, Task, child
from pallas_kernels.benchmark.record import Record


def dies() -> list[Result]:
    os._exit(9)


def hangs() -> list[Result]:
    time.sleep(60)
    return []


def raises() -> list[Result]:
    raise RuntimeError("no such instruction\nand more")


def tasks(session: Session, options: Mapping[str, Any], record: Record) -> Iterator[Task]:
    yield Task({"name": "first"}, lambda: [{"kind": "number", "value": 1}])
    yield Task({"name": "raises"}, raises)
    yield Task({"name": "is no number"}, lambda: [{"kind": "number", "value": float("nan")}])
    yield Task({"name": "dies"}, dies)
    yield Task({"name": "hangs"}, hangs, seconds=0.3)
    yield Task({"name": "last"}, lambda: [{"kind": "number", "value": session.samples}])


if __name__ == "__main__":
    sys.exit(child({"dying": tasks}))
