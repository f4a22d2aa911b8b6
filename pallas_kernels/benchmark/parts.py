"""Measurements in parts, most valuable first: what has a result is never measured again.

The parent starts one process per part. A process that dies is started again while the part has
time, and continues behind what ended it. What hangs ends its process too: a thread of
`faulthandler` sees to it. So a kernel that crashes or hangs costs itself only.
"""

import argparse
import faulthandler
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch, _measurements
from pallas_kernels.benchmark.candidates import Session
from pallas_kernels.benchmark.record import Record

TRIES = 2
NOTHING_LEFT, TIME_OVER, DEVICE_LOST = 0, 3, 4
START = 30.0  # Seconds beyond its own that a process may take, to start and to end.
SAMPLES = {"cpu": 3, "other": 7, "rehearsal": 1}

Result = dict[str, Any]


class Part(NamedTuple):
    """A group of measurements, which runs in a process of its own.

    Attributes:
      name: Its name in lines of the record.
      module: The module whose `main` is called in the process, as `python -m module NAME`.
      seconds: The time that it may take before parts after it.
    """

    name: str
    module: str
    seconds: float


class Task(NamedTuple):
    """One measurement.

    Attributes:
      about: What is measured; the values are its key.
      run: Returns its results. What it raises is its result too.
      seconds: After so long the process ends.
    """

    about: Mapping[str, Any]
    run: Callable[[], Iterable[Result]]
    seconds: float = 60.0

    @property
    def key(self) -> str:
        """Names the measurement within its part."""
        return ", ".join(str(value) for value in self.about.values() if value not in ("", {}))


Tasks = Callable[[Session, Mapping[str, Any], Record], Iterable[Task]]
"""The tasks of a part, from the session, the options of the run, and the record so far."""


def reason_of(error: BaseException) -> str:
    """The first line of an error."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:300]


def size_class(platform: str, rehearse: bool) -> str:
    """The key of tables of sizes."""
    return "rehearsal" if rehearse else "cpu" if platform == "cpu" else "other"


def _device_answers() -> bool:
    """Whether the device still computes: after some errors it never does in this process."""
    try:
        jax.block_until_ready(jnp.zeros(8) + 1)
    except Exception:
        return False
    return True


def measure(record: Record, part: str, tasks: Iterable[Task], seconds: float) -> int:
    """Runs the tasks that have no result, while there is time; returns an exit code."""
    until = time.monotonic() + seconds
    ended, begun = record.ends(part)
    # What was begun in vain goes last, so that it does not delay others.
    for task in sorted(tasks, key=lambda task: task.key in begun and task.key not in ended):
        if task.key in ended:
            continue
        line = {"part": part, "key": task.key, **task.about}
        if begun[task.key] >= TRIES:
            reason = f"{TRIES} times the process ended before it"
            record.add({"kind": "skipped", **line, "reason": reason})
            print(f"{task.key}: SKIPPED: {reason}", flush=True)
            continue
        start = time.monotonic()
        if start >= until:
            return TIME_OVER
        record.add({"kind": "begun", **line})
        faulthandler.dump_traceback_later(min(task.seconds, until - start), exit=True)
        try:
            results = list(task.run())
            json.dumps(results, allow_nan=False)
            line |= {"kind": "done", "results": results}
        except Exception as error:
            line |= {"kind": "failed", "reason": reason_of(error)}
            print(f"{task.key}: FAILED: {line['reason']}", flush=True)
        finally:
            faulthandler.cancel_dump_traceback_later()
        record.add(line | {"seconds": round(time.monotonic() - start, 3)})
        kinds = [line["kind"], *(each["kind"] for each in line.get("results", ()))]
        if "failed" in kinds and not _device_answers():
            return DEVICE_LOST
    return NOTHING_LEFT


def child(parts: Mapping[str, Tasks], arguments: Sequence[str] | None = None) -> int:
    """Runs a part in this process; returns its exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=list(parts))
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--until", type=float, required=True)  # Of `time.time`.
    parser.add_argument("--options", type=json.loads, default={})
    given = parser.parse_args(arguments)
    options = given.options
    rehearse, most = options.get("rehearse", False), options.get("most")
    # No file of earlier measurements decides what is measured now.
    with _dispatch.rehearsal(rehearse), _measurements.use(()):
        device = _dispatch.target()
        samples = options.get("samples") or SAMPLES[size_class(device.platform, rehearse)]
        session = Session(device, samples, rehearse, options.get("tune", False))
        record = Record(given.record)
        tasks = list(parts[given.part](session, options, record))[:most]
        return measure(record, given.part, tasks, given.until - time.time())


def _run_part(part: Part, record: Record, seconds: float, options: Mapping[str, Any]) -> bool:
    """Runs a part, in as many processes as it needs; returns whether nothing is left of it."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        command = [sys.executable, "-m", part.module, part.name, "--record", str(record.folder)]
        command += ["--until", f"{time.time() + left:.3f}", "--options", json.dumps(options)]
        before = len(record.lines())
        try:
            code: int | str = subprocess.run(
                command, timeout=left + START, check=False, stdin=subprocess.DEVNULL
            ).returncode
        except subprocess.TimeoutExpired:
            code = "none in time"
        if code in (NOTHING_LEFT, TIME_OVER):
            return code == NOTHING_LEFT
        over = time.monotonic() >= until
        print(f"{part.name}: {'its time is over' if over else f'exit code {code}'}", flush=True)
        unchanged = len(record.lines()) == before  # It did not even begin.
        record.add({"kind": "cut" if over else "died", "part": part.name, "code": code})
        if unchanged:
            return False
    return False


def run(parts: Sequence[Part], record: Record, seconds: float, options: Mapping[str, Any]) -> bool:
    """Runs parts in their order, then what is left of them; returns whether nothing is left."""
    until = time.monotonic() + seconds
    left = list(parts)
    for limited in (True, False):
        unfinished = []
        for number, part in enumerate(left):
            longest = until - time.monotonic()
            most = min(part.seconds, longest) if limited else longest / (len(left) - number)
            if not _run_part(part, record, most, options):
                unfinished.append(part)
        left = unfinished
    return not left


def bad_lines(record: Record, parts: Iterable[Part]) -> list[Result]:
    """What failed, was skipped or is wrong."""
    found = record.results(part.name for part in parts)
    return [one for one in found if one["kind"] in ("failed", "skipped") or one.get("wrong")]
