"""Islands: what is a worker to an owner above, and an owner to its own workers."""

import collections
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._contract import PyTree
from jaxcomm.asynchronous._messages import Clock, Job, Order, Report, Row
from jaxcomm.asynchronous._owner import Limits, Owner
from jaxcomm.asynchronous._replay import Replay
from jaxcomm.asynchronous._worker import News, Worker, is_finite
from jaxcomm.synchronization.events import Task
from jaxcomm.synchronization.events._engine import key_of


def job_of_island(job: Job, index: int, *begun: int) -> Job:
    """What the workers of an island are given: of n islands, i has the examples i, i + n, ...

    An island that has `begun` again deals them in another order.
    """
    island = job.island
    assert island is not None
    share = np.arange(index, job.examples, job.workers, dtype=np.int32)
    first = index * island.workers
    return job._replace(
        policy=island.policy,
        workers=island.workers,
        batches=lambda numbers, worker: job.batches(share[numbers], first + worker),
        seed=int(np.random.SeedSequence([job.seed, index, *begun]).generate_state(1)[0] // 2),
        examples=len(share),
        island=None,
    )


class IslandPrograms:
    """What an island computes as a worker: its gradient is what its own workers have changed."""

    def __init__(self, job: Job, index: int, clock: Callable[[Job], Clock]) -> None:
        assert job.island is not None
        self._job, self._island, self._clock = job, job.island, clock
        self._index, self.life, self._owners = index, 0, 0
        self._owner: Owner | None = None
        self.rows: list[Row] = []  # since the last report
        self.join = jax.jit(lambda params: job.policy.join(params, job.workers))
        self.receive, self.pruned = jax.jit(job.policy.receive), job.policy.pruned

        def finish(
            own: PyTree, view: PyTree, task: Task, loss: jax.Array, change: PyTree
        ) -> tuple[jax.Array, PyTree, PyTree, jax.Array]:
            loss, message, own = job.policy.steps(lambda point, task: (loss, change))(
                own, view, task
            )
            return loss, message, own, is_finite((loss, message))

        def point(own: PyTree, view: PyTree, task: Task) -> PyTree:
            asked: list[PyTree] = []

            def work(point: PyTree, task: Task) -> tuple[jax.Array, PyTree]:
                asked.append(point)
                return jnp.zeros(()), jax.tree.map(jnp.zeros_like, point)

            job.policy.steps(work)(own, view, task)
            (found,) = asked
            return found

        # Between them, the island's own workers compute what the policy asks for.
        self._point, self._finish = jax.jit(point), jax.jit(finish)
        self._task = jax.jit(lambda at, number: Task(at, number, key_of(job.seed, at, number)))

    def batches(self, numbers: np.ndarray, worker: int) -> PyTree:
        """Nothing: the island deals."""

    def step(
        self, own: PyTree, view: PyTree, worker: np.int32, number: np.int32, batch: PyTree
    ) -> Any:
        """As of a worker."""
        task = self._task(worker, number)
        return self._finish(own, view, task, *self._work(self._point(own, view, task)))

    def _work(self, point: PyTree) -> tuple[jax.Array, PyTree]:
        """`point -> (loss, pseudo-gradient)`."""
        if self._owner is None:
            inner = job_of_island(self._job, self._index, self.life, self._owners)
            limits = Limits(np.inf, np.inf, inner.workers, np.inf)
            self._owners += 1
            self._owner = Owner(inner, point, limits, self._clock(inner), None, self.rows.append)
            self._owner.start()
        else:
            self._owner.move_to(point)
        before, known = self._owner.model, len(self.rows)
        try:
            self._owner.advance(self._owner.messages + self._island.messages)
        except FloatingPointError:
            self._owner = None  # Another begins at the parameters of the owner above.
            return jnp.float32(jnp.nan), jax.tree.map(jnp.zeros_like, point)
        losses = [row.loss for row in self.rows[known:] if row.outcome in ("used", "stale")]
        change = jax.tree.map(lambda x, y: jnp.asarray(x - y), before, self._owner.model)
        return jnp.float32(np.mean(losses)), change


class IslandWorker:
    """An island, in whichever process it is."""

    def __init__(self, job: Job, index: int, clock: Callable[[Job], Clock]) -> None:
        self._programs = IslandPrograms(job, index, clock)
        self._worker = Worker(self._programs, index)

    def run(self, order: Order, news: News) -> Report:
        """Computes pseudo-gradients; the report has the rows of the workers."""
        self._programs.life = order.life
        report = self._worker.run(order, news)
        rows = tuple(self._programs.rows)
        self._programs.rows.clear()
        examples = sum(row.examples for row in rows if row.outcome == "used")
        return report._replace(examples=examples, rows=rows)


class ReplayOfIslands(Replay):
    """The clock of a run that has been recorded, whose rows have those of islands."""

    def __init__(self, job: Job, rows: Iterable[Row | None]) -> None:
        super().__init__(job, rows)
        self._job = job
        self._inner: dict[int, collections.deque[Row]] = {}

    def worker(self, index: int) -> IslandWorker:
        """An island that joins."""
        rows = self._inner[index] = collections.deque()
        return IslandWorker(self._job, index, lambda inner: Replay(inner, _drained(rows)))

    def run(self, row: Row) -> Report:
        """Computes what an island's own rows say."""
        self._inner[row.worker].extend(row.inner)
        return super().run(row)


def _drained(rows: collections.deque[Row]) -> Iterator[Row | None]:
    while True:
        yield rows.popleft() if rows else None
