"""A training on Ray whose processes are killed, stopped, resumed, and get NaN, at random moments.

`python -m tests.asynchronous.chaos --seconds 1800 --seed 0` disturbs each policy for its share of
the time, checks that everything is accounted for, and prints what has happened.
"""

import _thread
import argparse
import collections
import functools
import itertools
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optax

from jaxcomm import asynchronous
from jaxcomm.asynchronous import Row
from jaxcomm.synchronization import events
from tests.asynchronous import ledger
from tests.asynchronous.program import connected, processes, train_in_a_full_store

WORKERS = 4
PATIENCE = 4.0
PACE = 0.05  # Seconds that a gradient waits, so that signals meet it.
LEAST = 3.0  # Seconds between two acts of a long run; the most is twice as long.
LONG = 30.0  # Seconds of a stop that is longer than any deadline.
HANGS = 240.0  # Seconds without a row, after which a run is ended.
MOST_STALE = 12
ROUND = ["kill", "stop briefly", "stop", "place", "kill", "stop briefly", "owner", "place"]
# A merge has one displacement, so that the parameters are sums of whole messages.
POLICIES: dict[str, tuple[Callable[[], events.Policy], int]] = {
    "parameter_server": (
        lambda: events.parameter_server(optax.sgd(1.0), most_stale=MOST_STALE), 1,
    ),
    "decoupled_diloco": (
        lambda: events.decoupled_diloco(optax.sgd(1.0), optax.sgd(1.0), 4, quorum=1), 4,
    ),
}  # fmt: skip


class Place:
    """An actor that takes a worker's place in the cluster."""


class Chaos:
    """A thread that disturbs a run, and the rows that the run has reported."""

    def __init__(self, ray: Any, seed: int, seconds: float, directory: Path) -> None:
        self._ray, self._draw, self._directory = ray, random.Random(seed), directory
        self._least = min(LEAST, seconds / 30)
        self._place: Any = None
        self._resumes: dict[int, float] = {}  # When each stopped process goes on.
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.counts: collections.Counter[str] = collections.Counter()
        self.heard: list[tuple[float, Row]] = []
        self.deaths: list[float] = []
        self._hangs = False

    def __enter__(self) -> "Chaos":
        self._take_or_leave_a_place()  # One worker then joins late.
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        is_alive = self._thread.is_alive()
        self._ended.set()
        self._thread.join()
        for pid in self._resumes:
            self._send(pid, signal.SIGCONT)
        if self._place is not None:
            self._ray.kill(self._place)
        assert is_alive, "no row for long: the run hangs" if self._hangs else "the thread has ended"

    def on_row(self, row: Row) -> None:
        self.heard.append((time.monotonic(), row))

    def _run(self) -> None:
        began = printed = time.monotonic()
        until, acts = 0.0, list[str]()
        while not self._ended.wait(0.1):
            now = time.monotonic()
            if now - (self.heard[-1][0] if self.heard else began) > HANGS:
                self._hangs = True
                _thread.interrupt_main()
                return
            if now - printed > 60:
                printed = now
                print(
                    f"{now - began:.0f} s: {len(self.heard)} rows,", dict(self.counts), flush=True
                )
            for pid in [pid for pid, due in self._resumes.items() if now > due]:
                is_there = self._send(pid, signal.SIGCONT)
                self.counts["workers resumed" if is_there else "workers replaced by then"] += 1
                del self._resumes[pid]
            if now > until and any(row.outcome for _, row in self.heard):
                acts = acts or self._draw.sample(ROUND, len(ROUND))
                if self._act(acts[-1]):
                    acts.pop()
                    until = now + self._draw.uniform(self._least, 2 * self._least)

    def _act(self, name: str) -> bool:
        """Does it, if it is possible now."""
        if name == "place":
            return self._take_or_leave_a_place()
        if name == "owner":
            return self._kill_the_owner()
        if name == "kill":
            return self._disturb(signal.SIGKILL) is not None
        pid = self._disturb(signal.SIGSTOP)
        if pid is not None:
            wait = LONG if name == "stop" else self._draw.uniform(0.3, 2.0)
            self._resumes[pid] = time.monotonic() + wait
        return pid is not None

    def _disturb(self, number: int) -> int | None:
        """Sends a signal to a worker that is not stopped."""
        pids = [pid for pid in processes("WorkerProcess") if pid not in self._resumes]
        if not pids or not self._send(pid := self._draw.choice(pids), number):
            return None
        self.counts["workers killed" if number == signal.SIGKILL else "workers stopped"] += 1
        return pid

    def _kill_the_owner(self) -> bool:
        restored = sum(row.kind == "restored" for _, row in self.heard)
        is_saved = any(path.name.isdecimal() for path in self._directory.glob("*"))
        owners = processes("OwnerProcess")
        if not is_saved or restored < len(self.deaths) or not owners:
            return False
        self.deaths.append(time.monotonic())
        self.counts["owners killed"] += 1
        return self._send(owners[0], signal.SIGKILL)

    def _take_or_leave_a_place(self) -> bool:
        """Takes the place of the next worker that dies, or leaves it, so that one joins."""
        if self._place is not None:
            self._ray.kill(self._place)
            self._place = None
            self.counts["late joins"] += 1
            return True
        if self.heard and self._disturb(signal.SIGKILL) is None:
            return False
        self._place = self._ray.remote(num_cpus=1)(Place).remote()
        return True

    def _send(self, pid: int, number: int) -> bool:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True


def longest_wait(chaos: Chaos, rows: list[Row]) -> tuple[float, float]:
    """The longest time without a row, and the longest that the deadlines of workers explain."""
    times = [seconds for seconds, _ in chaos.heard]
    waits = [after - before for before, after in itertools.pairwise(times)]
    work, starts, before = [0.0], [0.0], dict[int, Row]()
    for row in rows:
        last = before.get(row.worker)
        if last is not None and row.seconds > last.seconds:
            took = row.seconds - last.seconds
            work += [took] if row.kind == "arrived" else []
            starts += [took] if row.kind == "joined" and last.kind == "left" else []
        before[row.worker] = row
    return max(waits, default=0.0), PATIENCE * max(work) + 2 * max(starts) + 30


def run(name: str, seconds: float, seed: int, folder: Path) -> collections.Counter[str]:
    """Disturbs a run with a policy, checks its end, and returns what has happened."""
    import ray

    policy, period = POLICIES[name][0](), POLICIES[name][1]
    files, directory = folder / "files", folder / "checkpoints"
    files.mkdir(parents=True)
    options: dict[str, Any] = {
        "policy": policy, "workers": WORKERS, "examples": ledger.EXAMPLES,
        "batch_size": ledger.BATCH, "seconds": seconds, "seed": seed, "devices": 1, "start": 2,
        "patience": PATIENCE, "checkpoint_seconds": 1.0, "progress": False,
    }  # fmt: skip
    with connected(num_cpus=WORKERS):
        with Chaos(ray, seed, seconds, directory) as chaos:
            result = asynchronous.train(
                ledger.loss, ledger.START, functools.partial(ledger.logged, files, PACE),
                **options, directory=directory, on_row=chaos.on_row,
            )  # fmt: skip
        deadline = time.monotonic() + 30
        while left := [*processes("WorkerProcess"), *processes("OwnerProcess")]:
            assert time.monotonic() < deadline, left
            time.sleep(0.2)
    assert not processes("")
    account = ledger.account(chaos.heard, files, period, chaos.deaths)
    ledger.check(account, result.params, result.rows, result.summary, period * ledger.BATCH)
    if name == "parameter_server":
        ledger.check_staleness(result.rows, MOST_STALE)
    waited, most = longest_wait(chaos, result.rows)
    assert waited < most, (waited, most)
    again = asynchronous.train(
        ledger.loss, ledger.START, ledger.batch_of, **options, replay=result.rows
    )
    np.testing.assert_array_equal(again.params["applied"], result.params["applied"])
    summary = result.summary
    print(f"{name}: no more than {waited:.1f} s without a row; {summary}", flush=True)
    more = {"messages with NaN": summary.nonfinite, "updates": summary.used}
    more |= {"updates undone": summary.undone}
    return chaos.counts + collections.Counter(more) + account.examples


def main(seconds: float, seed: int) -> collections.Counter[str]:
    """A full object store, then a run of each policy."""
    counts: collections.Counter[str] = collections.Counter()
    try:
        train_in_a_full_store()
    except RuntimeError as error:
        assert "object store and the disk" in str(error)
        counts["full object stores"] += 1
    assert not processes("") and counts
    for name in POLICIES:
        with tempfile.TemporaryDirectory() as folder:
            counts += run(name, seconds / len(POLICIES), seed, Path(folder))
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for what, count in sorted(main(given.seconds, given.seed).items()):
        print(f"{what:24} {count:8}")
