"""An account of a run that does not rely on its counts: files of the workers, and the parameters.

Each worker's process writes the numbers of its examples to a file of its own. The gradient of the
loss is -1 for each of them, so the parameters count exactly how often each example was applied.
"""

import collections
import itertools
import json
import math
import os
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jax import lax

from jaxcomm.asynchronous import Row, Summary

EXAMPLES, BATCH = 96, 4
START = {"applied": np.zeros(EXAMPLES, np.float32)}
UNHEARD = 3.0  # Seconds before the death of an owner, whose rows the program may not have.

Heard = Sequence[tuple[float, Row]]  # Rows, and when the program got them.


def loss(params: Any, batch: Any) -> jax.Array:
    """The number of updates in the parameters; minus a count of the examples by its gradient."""
    numbers, weights = batch
    applied = params["applied"]
    count = jnp.sum(applied[numbers] * weights)
    return lax.stop_gradient(jnp.sum(applied) / BATCH + count) - count


def is_bad(numbers: np.ndarray) -> bool:
    """Whether the batch of these examples has a NaN: one in fifty, the same in a replay."""
    return zlib.crc32(np.asarray(numbers, np.int32).tobytes()) % 50 == 0


def batch_of(numbers: np.ndarray, worker: int) -> Any:
    weights = np.ones(len(numbers), np.float32)
    weights[0] = np.nan if is_bad(numbers) else 1
    return np.asarray(numbers), weights


def logged(folder: Path, pace: float, numbers: np.ndarray, worker: int) -> Any:
    """The batch, after a line in the file of this process and a wait of `pace` seconds."""
    # A number of a process may be given again.
    name = f"{worker}-{os.getpid()}-{psutil.Process().create_time()}"
    line = json.dumps([time.monotonic(), numbers.tolist()]) + "\n"
    file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, line.encode())
    os.close(file)
    time.sleep(pace)
    return batch_of(numbers, worker)


class Call(NamedTuple):
    """What a worker was given for one gradient."""

    seconds: float
    numbers: np.ndarray


class Life:
    """A worker from its joining until it left, its owner died or the run ended."""

    def __init__(self, joined: float, death: float) -> None:
        self.joined, self.death = joined, death  # The latter of its owner; it may be infinite.
        self.end = "in flight" if math.isinf(death) else "undone"  # what its last order has become
        self.arrived: list[int] = []  # numbers of rows
        self.calls: list[Call] = []


class Ledger(NamedTuple):
    """What became of each call of `batches`, and of each example.

    Attributes:
      examples: In calls that were used, stale, nonfinite, lost, undone, or in flight at the end.
      applied: How often each example was used, from the files.
      dealt: How often each example was used or dropped.
      last: How often each example is in the last message that arrived.
      kept: The rows without those that the death of an owner has undone.
      undone: The messages that were used in other rows.
    """

    examples: collections.Counter[str]
    applied: np.ndarray
    dealt: np.ndarray
    last: np.ndarray
    kept: list[Row]
    undone: int


def _files(folder: Path) -> list[tuple[int, list[Call]]]:
    """The worker and the calls of each process, in the order of their first calls."""
    found = []
    for path in folder.iterdir():
        lines = map(json.loads, path.read_text().splitlines())
        calls = [Call(seconds, np.array(numbers)) for seconds, numbers in lines]
        found.append((int(path.name.split("-")[0]), calls))
    return sorted(found, key=lambda file: file[1][0].seconds)


def _kept(rows: list[Row]) -> list[int]:
    """The numbers of the rows that no death of an owner has undone."""
    kept: list[int] = []
    for i, row in enumerate(rows):
        if row.kind == "restored":
            assert len(kept) >= row.number, f"{row.number - len(kept)} rows were never heard"
            del kept[row.number :]
        kept.append(i)
    return kept


def _lives(heard: Heard, deaths: Sequence[float]) -> dict[int, list[Life]]:
    """The lives of each worker, by the rows of one owner after the other."""
    lives: dict[int, list[Life]] = collections.defaultdict(list)
    cuts = [i for i, (_, row) in enumerate(heard) if row.kind == "restored"]
    assert len(deaths) - len(cuts) in (0, 1)  # One may have died after its last row.
    ends = [*deaths[: len(cuts)], math.inf]
    parts = zip([0, *cuts], [*cuts, len(heard)], ends, strict=True)
    for begin, end, death in parts:
        # A row is heard soon after it has happened; some at once.
        origin = min((seconds - row.seconds for seconds, row in heard[begin:end]), default=0.0)
        present: dict[int, Life] = {}
        for i in range(begin, end):
            row = heard[i][1]
            if row.kind == "joined":
                present[row.worker] = Life(origin + row.seconds, death)
                lives[row.worker].append(present[row.worker])
            elif row.kind == "arrived":
                present[row.worker].arrived.append(i)
            elif row.kind == "left" and row.worker in present:
                present.pop(row.worker).end = row.outcome
    return lives


def account(heard: Heard, folder: Path, period: int, deaths: Sequence[float]) -> Ledger:
    """The ledger of a run.

    Args:
      heard: The rows as they came, undone ones too, with the times.
      folder: Of the files of the workers.
      period: The gradients of a message.
      deaths: When owners were killed.
    """
    rows, lives = [row for _, row in heard], _lives(heard, deaths)
    kept = {i: rows[i] for i in _kept(rows)}
    calls: collections.Counter[str] = collections.Counter()
    for worker, file in _files(folder):
        began = file[0].seconds
        life = [life for life in lives[worker] if life.joined <= began + 0.5][-1]
        if life.calls:  # Of one more, which joined unheard before its owner died.
            assert began > life.death - UNHEARD
            calls["undone"] += len(file)
        else:
            life.calls = file
    counts: dict[int, np.ndarray] = {}  # of the examples in each kept message
    for life in itertools.chain(*lives.values()):
        orders = [life.calls[i : i + period] for i in range(0, len(life.calls), period)]
        assert len(orders) >= len(life.arrived)
        for i, order in zip(life.arrived, orders, strict=False):
            assert len(order) == period and rows[i].examples == period * BATCH
            is_nonfinite = any(is_bad(call.numbers) for call in order)
            assert (rows[i].outcome == "nonfinite") == is_nonfinite
            calls[rows[i].outcome if i in kept else "undone"] += period
            if i in kept:
                numbers = np.concatenate([call.numbers for call in order])
                counts[i] = np.bincount(numbers, minlength=EXAMPLES)
        # The owner had sent one order more, or several of whose arrivals no row was heard.
        more = orders[len(life.arrived) :]
        assert all(order[0].seconds > life.death - UNHEARD for order in more[1:])
        assert life.end or not more
        calls[life.end] += sum(map(len, more))
    none = np.zeros(EXAMPLES, int)  # A short run on a busy machine may end before any arrives.
    arrived = sorted(counts)
    used = [counts[i] for i in arrived if rows[i].outcome == "used"]
    return Ledger(
        examples=collections.Counter({f"examples {x}": calls[x] * BATCH for x in calls if x}),
        applied=np.sum([none, *used], axis=0),
        dealt=np.sum([none, *counts.values()], axis=0),
        last=counts[arrived[-1]] if arrived else none,
        kept=[*kept.values()],
        undone=sum(row.outcome == "used" for i, row in enumerate(rows) if i not in kept),
    )


def check(ledger: Ledger, params: Any, rows: list[Row], summary: Summary, size: int) -> None:
    """The rows, counts and parameters of a run with messages of this size are the ledger's."""
    assert repr(rows) == repr(ledger.kept)
    outcomes = collections.Counter(row.outcome for row in rows)
    counted = summary.used, summary.stale, summary.nonfinite, summary.lost, summary.undone
    expected = [outcomes[name] for name in ("used", "stale", "nonfinite", "lost")]
    assert counted == (*expected, ledger.undone)
    assert summary.examples == ledger.applied.sum()
    missing = ledger.applied - params["applied"]
    is_waiting = size > BATCH and (missing == ledger.last).all()  # The last one, for its merge.
    assert is_waiting or not missing.any(), missing
    # Each finished epoch has dealt each example once; workers have the rest, or it is dealt next.
    absent = np.maximum(ledger.dealt.max() - 1 - ledger.dealt, 0).sum()
    assert absent <= size * summary.workers, ledger.dealt


def check_staleness(rows: list[Row], most_stale: int) -> None:
    """The loss is the number of updates that the worker had read: no gradient is too stale."""
    used = [row for row in rows if row.outcome == "used"]
    for count, row in enumerate(used):
        assert 0 <= count - row.loss <= most_stale, (count, row)
