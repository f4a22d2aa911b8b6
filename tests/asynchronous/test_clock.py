"""The clock of Ray, with threads in place of processes: who is taken for dead, and who is not."""

import threading
import time
from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import optax
import pytest

from jaxcomm.asynchronous import Row, _ray
from jaxcomm.asynchronous._coordinator import Coordinator, replayed
from jaxcomm.asynchronous._messages import Order
from jaxcomm.synchronization import events
from tests.asynchronous.simulated import START, batches, job_of, limits_of
from tests.asynchronous.threads import clock_of

Act = Callable[[Row, Any], None]


class Meeting:
    """A run of workers that meet, in a thread; `act` is called with each row and the clock."""

    def __init__(
        self, monkeypatch: Any, graph: nx.Graph, act: Act, messages: int, pace: float,
        patience: float = 10.0, load: Any = batches,
    ) -> None:  # fmt: skip
        def paced(numbers: np.ndarray, worker: int) -> Any:
            time.sleep(pace)
            return load(numbers, worker)

        policy = events.asynchronous_pairs(optax.sgd(0.02), graph)
        self.job = job = job_of(policy, workers=len(graph), batches=paced)
        self.clock, self.ray = clock_of(job, monkeypatch, patience)
        self.rows: list[Row] = []
        self.error: Exception | None = None

        def on_row(row: Row) -> None:
            self.rows.append(row)
            act(row, self.clock)

        self.limits = limits_of(messages, start=len(graph))
        self.owner = Coordinator(job, START, self.limits, self.clock, None, on_row)
        self.thread = threading.Thread(target=self._run, daemon=True)

    def until_done(self, seconds: float) -> "Meeting":
        self.thread.start()
        self.thread.join(seconds)
        hangs = self.thread.is_alive()
        self.clock._stopped.set()
        self.ray.end()
        assert not hangs, "the run hangs"
        if self.error is not None:
            raise self.error
        return self

    def of_kind(self, kind: str) -> list[Row]:
        return [row for row in self.rows if row.kind == kind]

    def _run(self) -> None:
        try:
            self.owner.run()
        except Exception as error:
            self.error = error


def test_a_wait_for_another_is_no_work_of_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else those that have waited for one that hangs could hang `patience` times as long."""
    frozen: list[int] = []

    def act(row: Row, clock: Any) -> None:
        if not frozen and row.kind == "arrived" and row.number > 5:
            frozen.append(row.worker)
            clock._actors[1].freeze()

    run = Meeting(monkeypatch, nx.complete_graph(3), act, 100, 0.02).until_done(60)
    (left,) = run.of_kind("left")
    waited = float(left.reason.split()[2])
    after = [row for row in run.rows if row.kind == "arrived" and row.seconds > left.seconds]
    assert after and max(max(took) for took in run.clock._took.values() if took) < waited / 2


def test_one_that_works_after_a_long_wait_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[threading.Timer] = []

    def act(row: Row, clock: Any) -> None:
        if not held and row.kind == "arrived" and row.worker == 0 and row.number == 5:
            # As while it answers another one, which hangs, when it begins its next gradient.
            worker = clock._actors[0]._object._worker
            worker._lock.acquire()
            longest = max(clock._took[0])
            held.append(threading.Timer(clock._patience * longest - 0.1, worker._lock.release))
            held[0].start()

    run = Meeting(monkeypatch, nx.path_graph(2), act, 20, 0.3, patience=4.0).until_done(80)
    assert held and not run.of_kind("left")


def test_one_that_hangs_before_anyone_has_worked_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def act(row: Row, clock: Any) -> None:
        if len(run.rows) == 2:  # Both have joined; each will wait for the other.
            clock._actors[1].freeze()

    run = Meeting(monkeypatch, nx.path_graph(2), act, 20, 0.1, patience=2.0)
    run.until_done(60)
    assert [row.worker for row in run.of_kind("left")] == [1]


def test_one_that_waits_at_the_end_for_one_that_hangs_is_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_ray, "_SECONDS_TO_SHOW", 3.0)
    frozen: list[int] = []

    def act(row: Row, clock: Any) -> None:
        if not frozen and row.kind == "arrived" and row.number > 5:
            frozen.append(1)
            clock._actors[1].freeze()

    # Worker 0 locks its parameters and waits; 2 and 3 go on to the end.
    graph = nx.Graph([(0, 1), (0, 2), (2, 3)])
    run = Meeting(monkeypatch, graph, act, 100, 0.05, patience=1e3).until_done(60)
    assert not run.of_kind("left")
    assert [row.worker for row in run.of_kind("collected")] == [0, 2, 3]


@pytest.mark.parametrize(("workers", "slow"), [(1, -1), (2, 0), (2, 1)])
def test_parameters_that_died_with_all_workers_are_missed(
    workers: int, slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the first to report has the first parameters from another, `slow` one."""
    killed: list[int] = []

    def act(row: Row, clock: Any) -> None:
        if not killed and row.kind == "arrived" and row.number > 5:
            killed.extend(clock._actors)
            for actor in clock._actors.values():
                actor.kill()

    def load(numbers: np.ndarray, worker: int) -> Any:
        time.sleep(0.5 * bool(killed and worker == slow))
        return batches(numbers, worker)

    run = Meeting(monkeypatch, nx.path_graph(workers), act, 60, 0.05, load=load)
    with pytest.raises(RuntimeError, match="No worker is left"):
        run.until_done(60)


def test_one_that_dies_returns_to_the_parameters_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[int] = []

    def act(row: Row, clock: Any) -> None:
        if row.kind == "arrived" and row.number > 5 * len(killed) + 5 and len(killed) < 4:
            killed.append(len(killed) % 2)
            clock._actors[killed[-1]].kill()

    run = Meeting(monkeypatch, nx.path_graph(2), act, 120, 0.05).until_done(60)
    assert len(run.of_kind("left")) == 4 and len(run.of_kind("collected")) == 2
    model, rows, is_done = replayed(run.job, START, run.limits, run.rows)
    np.testing.assert_array_equal(run.owner.model["w"], model["w"])
    assert is_done and [repr(row) for row in rows] == [repr(row) for row in run.rows]


def test_a_worker_is_not_silent_while_its_owner_does_not_listen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as an island that waits for the owner above it."""
    job = job_of(events.parameter_server(optax.sgd(0.02)), workers=1)
    clock, ray = clock_of(job, monkeypatch, patience=4.0)
    clock.start(0)
    assert clock.next(np.inf).kind == "joined"
    for number in range(3):
        examples = np.zeros((1, 2), np.int32)
        order = Order(number, examples, START) if number == 0 else Order(number, examples)
        clock.begin(0, order)
        assert clock.next(np.inf).kind == "arrived"
    before = max(clock._took[0])
    clock.begin(0, Order(3, examples))
    time.sleep(2.0)
    ray.actors[0].freeze()  # Its message has arrived.
    assert clock.next(np.inf).kind == "arrived" and max(clock._took[0]) < before + 1
    clock.begin(0, Order(4, examples))
    time.sleep(1.0)
    began = time.monotonic()
    assert clock.next(np.inf).kind == "left"
    assert 4 * before < time.monotonic() - began < 4 * before + 1
    ray.end()
