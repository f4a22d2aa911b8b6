"""Workers without an owner: no two wait for each other, and a run is replayed, whoever dies."""

import collections
import importlib.util
import itertools
import os
import signal
import threading
from typing import Any

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import pytest

from jaxcomm import asynchronous, gossip
from jaxcomm.asynchronous import Row
from jaxcomm.asynchronous._coordinator import dealt, rebuilt
from jaxcomm.asynchronous._messages import Order, Report
from jaxcomm.asynchronous._pairs import PairPrograms, PairWorker, Shown
from jaxcomm.synchronization import events
from jaxcomm.synchronization.events import Event
from jaxcomm.synchronization.events._engine import key_of
from tests.asynchronous.program import options_of, paced, processes
from tests.asynchronous.simulated import (
    BATCH,
    EXAMPLES,
    INPUTS,
    START,
    TARGETS,
    batches,
    job_of,
    limits_of,
    loss,
)

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no Ray")


class Threads:
    """Workers in threads of this process, and the rows that an owner would have recorded."""

    def __init__(self, graph: nx.Graph, start: Any = START, **changes: Any) -> None:
        policy = events.asynchronous_pairs(optax.sgd(0.05), graph)
        self.graph, self.count, self.start = graph, len(graph), start
        self.job = job_of(policy, workers=self.count, **changes)
        self.workers: list[Any] = []
        programs = PairPrograms(self.job)
        for index in range(self.count):
            self.workers.append(PairWorker(programs, index))
        self.rows = [Row("joined", 0.0, worker) for worker in range(self.count)]
        self.examples: dict[tuple[int, int, int], np.ndarray] = {}
        self.recording = threading.Lock()

    def peers(self, worker: int) -> dict[int, Any]:
        return {other: Here(self, other, worker) for other in self.graph[worker]}

    def run(self, worker: int, number: int, peers: Any = None) -> Report:
        examples = np.array([worker, number % EXAMPLES], np.int32)
        self.examples[worker, 0, number] = examples
        order = Order(number, examples[None], self.start if number == 0 else None)
        report: Report = self.workers[worker].run(order, peers or self.peers(worker))
        with self.recording:
            self.rows.append(row_of(worker, number, report))
        return report

    def shown(self, workers: Any) -> list[Any]:
        return [self.workers[worker].show().params["w"] for worker in workers]


def row_of(worker: int, number: int, report: Report) -> Row:
    outcome: Any = "nonfinite" if report.message is None else "used"
    return Row(
        "arrived", 1.0, worker, number, outcome=outcome, loss=report.loss, changes=report.changes
    )


class Here:
    """Another worker of the same process."""

    def __init__(self, threads: Threads, of: int, asks: int) -> None:
        self.threads, self.of, self.asks = threads, of, asks

    def meet(self, shown: Shown, number: int) -> Shown | None:
        answer: Shown | None = self.threads.workers[self.of].meet(shown, number)
        return answer

    def host(self, worker: int, number: int) -> None:
        self.threads.workers[self.of].host(Here(self.threads, worker, self.of), number)

    def show(self) -> Shown | None:
        shown: Shown | None = self.threads.workers[self.of].show()
        return shown


class Dies(Here):
    """One that averages, and dies before it answers."""

    def meet(self, shown: Shown, number: int) -> Shown | None:
        super().meet(shown, number)
        return None


GRAPHS = [gossip.ring(5), nx.path_graph(3), nx.complete_graph(4), nx.star_graph(3)]


@pytest.mark.parametrize("graph", GRAPHS, ids=["odd_ring", "path", "complete", "star"])
def test_no_two_wait_for_each_other_and_the_sum_is_kept(graph: nx.Graph) -> None:
    # Each gradient is 1, so that the sum of all workers falls by the rate.
    given = {"loss_fn": lambda params, batch: jnp.sum(params["w"]) + 0 * jnp.sum(batch[0])}
    threads = Threads(graph, **given, batches=lambda numbers, worker: (INPUTS, TARGETS))
    count, each = len(graph), 60

    def work(worker: int) -> None:
        for number in range(each):
            threads.run(worker, number)

    running = [threading.Thread(target=work, args=(worker,)) for worker in range(count)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(timeout=120)
        assert not thread.is_alive()
    total = np.sum(threads.shown(range(count)), axis=0)
    np.testing.assert_allclose(total, np.full(3, -0.05 * count * each), rtol=1e-4)
    changes = collections.Counter(
        (change.number >= 0, change.other is not None)
        for change in {change for row in threads.rows for change in row.changes}
    )
    assert changes[True, True] == count * each  # As many averages as gradients, of two.
    assert changes[False, True] >= 0.9 * count * each  # The last may not be reported yet.


@needs_ray
@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("deaths", [0, 2])
def test_processes_make_the_same_bits_as_a_replay(deaths: int) -> None:
    """And as the event engine in the same order, if no process dies."""
    policy = events.asynchronous_pairs(optax.sgd(0.02, momentum=0.5), gossip.ring(4))
    options = options_of(policy, workers=4, total=(200 + 400 * deaths) * BATCH)
    killed: list[float] = []

    def act(row: Row) -> None:
        if len(killed) < deaths and row.kind == "arrived" and row.number > 15 * len(killed) + 5:
            killed.append(row.seconds)
            os.kill(processes("PairProcess")[len(killed)], signal.SIGKILL)

    result = asynchronous.train(loss, START, paced, **options, on_row=act)
    again = asynchronous.train(loss, START, batches, **options, replay=result.rows)
    np.testing.assert_array_equal(result.params["w"], again.params["w"])
    assert [repr(row.loss) for row in result.rows] == [repr(row.loss) for row in again.rows]
    assert again.is_done and result.summary.examples == options["total"]
    assert result.summary.deaths >= deaths and not processes("")
    np.testing.assert_allclose(result.params["w"], [1, 2, 3], atol=0.5)
    if not deaths:
        expected = in_an_event_engine(policy, result.rows)
        np.testing.assert_allclose(result.params["w"], expected, rtol=1e-6)
        # Of 3 float32; averages whose row is missing at the end are of the next ones.
        assert 0 <= 400 * 12 + 4 * 24 - result.summary.upload_bytes <= 8 * 24


def in_an_event_engine(policy: events.Policy, rows: list[Row]) -> Any:
    """The events of a run, in an order in which each comes after those that it depends on."""
    job = job_of(policy)
    examples, _ = dealt(job, START, limits_of(200), rows)
    programs, finish = PairPrograms(job), jax.jit(policy.finish)
    state = policy.init(jax.tree.map(jnp.asarray, START), 4)
    ends = {row.worker: row.changes[-1].after.age for row in rows if row.kind == "collected"}
    changes = {change for row in rows for change in row.changes if change.number >= 0}
    ages = [0] * 4
    found: dict[int, Any] = {}
    while len(found) < 4:
        i, j, gradients = next(
            (change.after.worker, change.other.worker, change.number)
            for change in changes
            if change.other is not None
            and ages[change.after.worker] == change.after.age - 1
            and ages[change.other.worker] == change.other.age
        )
        worker, number = jnp.int32(i), jnp.int32(gradients)
        view, batch = policy.view(state, worker), batches(examples[i, 0, gradients], i)
        _, gradient, _ = programs.gradient(view, worker, number, batch)
        zero, key = jnp.int32(0), key_of(0, worker, number)
        event = Event(worker, number, zero, zero, jnp.float32(0), key)
        state, _, _ = finish(state, event, gradient)
        for at in (i, j):
            ages[at] += 1
            if ages[at] == ends[at]:
                found[at] = state.params["w"][at]
    return np.mean([found[worker] for worker in range(4)], axis=0)


def test_a_worker_that_dies_before_it_answers_has_changed_the_next() -> None:
    """The second averages with the first, which does not hear of it; the third with the second."""
    threads = Threads(nx.path_graph(3))
    threads.workers[1]._join(Order(0, np.zeros((1, 2), np.int32), START), {})
    threads.run(0, 0, {1: Dies(threads, 1, 0)})
    threads.run(2, 0, {1: Here(threads, 1, 2)})
    assert threads.workers[1]._version.age == 2
    first, third = (threads.workers[worker] for worker in (0, 2))
    changes = {change.after: change for row in threads.rows for change in row.changes}
    # The worker that died has reported nothing, and the third knows its changes.
    assert len([version for version in changes if version.worker == 1]) == 2
    ends = [first._version, third._version]
    model, _ = rebuilt(threads.job, START, changes, ends, threads.examples)
    np.testing.assert_array_equal(model["w"], np.mean(threads.shown([0, 2]), axis=0))


def test_a_replay_without_a_change_returns_the_first_parameters() -> None:
    options = options_of(events.asynchronous_pairs(optax.sgd(0.1), nx.path_graph(3)))
    for rows in ([], [Row("joined", 0.0, 0)]):
        result = asynchronous.train(loss, START, batches, **options, replay=rows)
        np.testing.assert_array_equal(result.params["w"], START["w"])
        assert not result.is_done


def test_parameters_in_bfloat16_are_averaged_in_float32() -> None:
    start = {"w": jnp.zeros(3, jnp.bfloat16)}
    wide = lambda params, batch: loss({"w": params["w"].astype(jnp.float32)}, batch)  # noqa: E731
    threads = Threads(nx.cycle_graph(3), start, loss_fn=wide)
    for number, worker in itertools.product(range(10), range(3)):
        threads.run(worker, number)
    shown = threads.shown(range(3))
    changes = {change.after: change for row in threads.rows for change in row.changes}
    ends = [worker._version for worker in threads.workers]
    # Those of the last meeting may not be in a row yet.
    changes |= {version: x for worker in threads.workers for version, x in worker._changes.items()}
    model, _ = rebuilt(threads.job, start, changes, ends, threads.examples)
    assert shown[0].dtype == np.float32 and model["w"].dtype == jnp.bfloat16 and model["w"].any()
    np.testing.assert_array_equal(model["w"], np.mean(shown, axis=0).astype(jnp.bfloat16))


def test_a_late_worker_begins_at_the_parameters_of_another() -> None:
    threads = Threads(nx.path_graph(3))
    for number in range(3):
        threads.run(0, number, {})
    before = threads.shown([0])[0]
    late = Order(0, np.zeros((1, 2), np.int32), START, is_late=True, life=1)
    threads.workers[1]._join(late, {2: Here(threads, 2, 1), 0: Here(threads, 0, 1)})
    np.testing.assert_array_equal(threads.shown([1])[0], before)


def test_one_whose_gradient_is_not_finite_goes_on_at_its_average() -> None:
    given = {
        "loss_fn": lambda params, batch: jnp.mean(jnp.log(params["w"]) ** 2) + 0 * batch[0][0, 0]
    }
    threads = Threads(nx.path_graph(2), **given)
    for worker, start in enumerate((-0.1, 4.0)):
        params = {"w": np.full(3, start, np.float32)}
        threads.workers[worker]._join(Order(0, np.zeros((1, 2), np.int32), params), {})
    outcomes = []
    for number in range(1, 4):
        for worker in range(2):
            outcomes.append(threads.run(worker, number).message is None)
    assert outcomes == [True, False, True, False, False, False]


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    nothing = {"batches": lambda numbers, worker: (INPUTS * np.nan, TARGETS)}
    threads = Threads(nx.path_graph(2), **nothing)
    for worker in range(2):
        assert threads.run(worker, 0).message is None
    np.testing.assert_array_equal(threads.shown([0, 1]), np.zeros((2, 3)))


@needs_ray
@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_those_that_wait_for_one_that_hangs_are_not_replaced() -> None:
    stopped: list[int] = []

    def act(row: Row) -> None:
        if not stopped and row.kind == "arrived" and row.number > 10:
            stopped.append(processes("PairProcess")[1])
            os.kill(stopped[0], signal.SIGSTOP)

    policy = events.asynchronous_pairs(optax.sgd(0.05), gossip.ring(4))
    options = options_of(policy, workers=4, total=1600, patience=4.0)
    result = asynchronous.train(loss, START, paced, **options, on_row=act)
    left = [row for row in result.rows if row.kind == "left"]
    assert len(left) == 1 and left[0].reason.startswith("silent for")
    assert not processes("")
