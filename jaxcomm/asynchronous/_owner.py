"""The owner of the parameters: a policy, fed by a clock."""

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._contract import PyTree
from jaxcomm.asynchronous._examples import Examples
from jaxcomm.asynchronous._messages import (
    Clock,
    Happening,
    Job,
    Order,
    Outcome,
    Report,
    Row,
    row_of,
)
from jaxcomm.checkpoint import Checkpoints
from jaxcomm.synchronization.events import Event, Policy
from jaxcomm.synchronization.events._engine import key_of
from jaxcomm.synchronization.events._messages import bytes_of

_MOST_NONFINITE = 20  # messages in a row, times the workers
_MOST_DEATHS = 5  # in a row, without a message, times the workers


class Limits(NamedTuple):
    """When a run ends, begins, and is saved."""

    total: float  # the examples after which a run ends
    seconds: float  # after which it ends
    start: int  # the workers with which it begins
    checkpoint_seconds: float


class Work(NamedTuple):
    """What a worker computes now."""

    order: Order
    position: int  # the messages before the worker was sent what it computes at


class Programs:
    """The functions of a policy, compiled."""

    def __init__(self, policy: Policy, workers: int, seed: int) -> None:
        def arrived(
            state: Any, event: Event, message: PyTree, idle: jax.Array
        ) -> tuple[Any, PyTree, jax.Array]:
            state = policy.tick(state, event.seconds)
            key = key_of(seed, event.worker, event.number)
            state, reply, _ = policy.finish(state, event._replace(key=key), message)
            return state, reply, policy.begins(state, idle)

        def news(state: Any) -> tuple[Any, jax.Array]:
            """The state after all workers have heard it, and those for whom it was new."""
            heard = []
            for worker in range(workers):
                state, sent = policy.hears(state, jnp.int32(worker))
                heard.append(sent.downloads > 0)
            return state, jnp.stack(heard)

        self.arrived, self.news = jax.jit(arrived), jax.jit(news)
        self.init = jax.jit(lambda params: policy.init(params, workers))
        assert policy.attend is not None
        self.begins, self.view = jax.jit(policy.begins), jax.jit(policy.view)
        self.tick, self.due = jax.jit(policy.tick), jax.jit(policy.due)
        self.attend, self.model = jax.jit(policy.attend), jax.jit(policy.model)
        self.move = jax.jit(policy.move) if policy.move is not None else None
        self.talks = policy.talks
        self.pushes = policy.talks is not None


class Owner:
    """Runs a policy: each happening of the clock changes its state and lets workers begin."""

    def __init__(
        self,
        job: Job,
        params: PyTree,
        limits: Limits,
        clock: Clock,
        checkpoints: Checkpoints | None = None,
        on_row: Callable[[Row], None] = lambda row: None,
        unsent: Callable[[], list[Row]] = list,
    ) -> None:
        workers = job.workers
        self._clock, self._limits, self._on_row, self._unsent = clock, limits, on_row, unsent
        self._batch_size = job.batch_size if job.island is None else 0  # It deals its own.
        self._run = Programs(job.policy, workers, job.seed)
        self._examples = Examples(job.seed, job.examples)
        self._state = self._run.init(jax.tree.map(jnp.asarray, params))
        self._present = np.zeros(workers, bool)
        self._work: list[Work | None] = [None] * workers
        self._new: list[bool] = [True] * workers  # whether a worker has not begun since it joined
        self._replies: list[PyTree] = [None] * workers
        self._read = [0] * workers  # the position of each worker's last work
        self._sent = np.zeros(workers, np.int64)  # bytes to each worker that no row has yet
        self._numbers, self._lives = np.zeros(workers, np.int64), np.full(workers, -1)
        self._position = self._trained = self._version = self._dropped = 0
        self._nonfinite = self._deaths = 0  # in a row
        self._began = False
        self._checkpoints, self._saved, self._saved_position, self._rows = checkpoints, 0.0, 0, 0
        if checkpoints is not None and checkpoints.steps:
            self._restore(checkpoints)

    @property
    def model(self) -> PyTree:
        """The parameters, as NumPy arrays."""
        return jax.tree.map(np.array, self._run.model(self._state))

    @property
    def is_done(self) -> bool:
        """Whether the run has reached its end."""
        return self._trained >= self._limits.total

    @property
    def messages(self) -> int:
        """How many have been finished."""
        return self._position

    def run(self) -> None:
        """Runs until the end, or until the clock is stopped."""
        self.start()
        self.advance(math.inf)
        self._save(math.inf)

    def start(self) -> None:
        """Starts the workers."""
        for worker in range(len(self._work)):
            self._clock.start(worker)

    def move_to(self, params: PyTree) -> None:
        """Changes the parameters, and nothing else."""
        assert self._run.move is not None
        change = jax.tree.map(jnp.subtract, params, self._run.model(self._state))
        self._state = self._run.move(self._state, change)

    def advance(self, messages: float) -> None:
        """Runs until so many messages, or until the end."""
        while not self.is_done and self._position < messages:
            due = float(self._run.due(self._state)) if self._run.pushes else math.inf
            happening = self._clock.next(min(due, self._limits.seconds))
            if happening.kind == "stopped" or happening.seconds >= self._limits.seconds:
                break
            getattr(self, f"_{happening.kind}")(happening)
            self._save(float(happening.seconds))

    # What happens.

    def _joined(self, happening: Happening) -> None:
        self._present[happening.worker], self._new[happening.worker] = True, True
        self._lives[happening.worker] += 1
        self._record(happening)
        if self._began:
            self._attend(happening.seconds)
        elif np.sum(self._present) >= self._limits.start:
            self._began = True
            self._attend(happening.seconds)

    def _left(self, happening: Happening) -> None:
        worker, work = happening.worker, self._work[happening.worker]
        self._present[worker], self._work[worker], self._replies[worker] = False, None, None
        self._deaths += 1
        if self._deaths > _MOST_DEATHS * len(self._work):
            raise RuntimeError(
                f"Workers have died {self._deaths} times in a row, the last time: "
                f"{happening.reason}"
            )
        lost = 0 if work is None else work.order.examples.size
        if work is not None:
            self._examples.give_back(work.order.examples)
        self._record(
            happening,
            outcome="" if work is None else "lost",
            examples=lost,
            download_bytes=int(self._sent[worker]),
            reason=happening.reason,
        )
        self._sent[worker] = 0
        self._clock.start(worker)
        if self._began:
            self._attend(happening.seconds)

    def _restored(self, happening: Happening) -> None:
        """The owner begins again at a checkpoint, and all workers join again."""
        for worker, work in enumerate(self._work):
            if work is not None:
                self._examples.give_back(work.order.examples)
            self._work[worker], self._replies[worker] = None, None
        self._present[:], self._sent[:], self._began = False, 0, False
        self._record(happening, number=self._rows)
        nobody = self._present.copy()
        self._state = self._run.attend(self._state, nobody, happening.seconds)

    def _time(self, happening: Happening) -> None:
        self._record(happening)
        self._state = self._run.tick(self._state, happening.seconds)
        self._begin(self._run.begins(self._state, self._idle))

    def _arrived(self, happening: Happening) -> None:
        worker, report, work = (
            happening.worker, happening.report, self._work[happening.worker],
        )  # fmt: skip
        assert report is not None and work is not None
        self._work[worker], self._deaths = None, 0
        staleness = self._position - work.position if report.staleness < 0 else report.staleness
        self._numbers[worker] += len(work.order.examples)
        outcome: Outcome = "nonfinite"
        examples = work.order.examples.size if report.examples < 0 else report.examples
        if report.message is None:
            begins = self._run.begins(self._state, self._idle)
        else:
            outcome, begins = self._finish(happening, report, work, staleness)
        self._trained += examples * (outcome == "used")
        self._nonfinite = 0 if report.message is not None else self._nonfinite + 1
        self._record(
            happening,
            number=work.order.number,
            staleness=staleness,
            outcome=outcome,
            loss=report.loss,
            examples=examples,
            work_seconds=report.seconds,
            upload_bytes=report.upload_bytes,
            download_bytes=int(self._sent[worker]) + report.download_bytes,
            heard=report.heard,
            changes=report.changes,
            inner=report.rows,
        )
        if self._nonfinite > _MOST_NONFINITE * len(self._work):
            raise FloatingPointError(
                f"The last {self._nonfinite} messages of workers were not finite: lower the "
                "learning rate, or look at the data."
            )
        self._sent[worker] = 0
        self._begin(begins)

    def _finish(
        self, happening: Happening, report: Report, work: Work, staleness: int
    ) -> tuple[Outcome, Any]:
        last = work.order.number + len(work.order.examples) - 1
        counts = map(np.int32, (happening.worker, last, self._position, staleness))
        event = Event(*counts, happening.seconds, ())  # type: ignore
        self._state, reply, begins = self._run.arrived(
            self._state, event, report.message, self._idle
        )
        self._replies[happening.worker] = reply
        self._position += 1
        dropped = int(getattr(self._state, "dropped", 0))
        stale, self._dropped = dropped > self._dropped, dropped
        return "stale" if stale else "used", begins

    # What follows.

    @property
    def _idle(self) -> np.ndarray:
        return np.array([work is None for work in self._work]) & self._present

    def _attend(self, seconds: np.float32) -> None:
        self._state = self._run.attend(self._state, self._present.copy(), seconds)
        self._begin(self._run.begins(self._state, self._idle))

    def _begin(self, begins: Any) -> None:
        """Gives work to those that begin, after the others have heard what is new."""
        if not self._began:
            return
        sent: dict[Any, PyTree] = {}

        def shared(tree: PyTree) -> PyTree:
            """The same tree for the same arrays, which the clock then sends once."""
            leaves, treedef = jax.tree.flatten(tree)
            return sent.setdefault((treedef, *map(id, leaves)), tree)

        if self._run.pushes:
            self._state, is_new = self._run.news(self._state)
            for worker in np.flatnonzero(np.asarray(is_new) & self._present):
                if self._work[worker] is not None or not self._new[worker]:
                    self._version += 1
                    view = shared(self._run.view(self._state, np.int32(worker)))
                    self._clock.hear(int(worker), self._version, view)
                    self._sent[worker] += bytes_of(view)
        for worker in np.flatnonzero(np.asarray(begins) & self._idle):
            number = int(self._numbers[worker])
            last = number
            while self._run.talks is not None and not self._run.talks(last):  # type: ignore[arg-type]
                last += 1
            batch, count = self._batch_size, last - number + 1
            joins = self._new[worker]
            order = Order(
                number=number,
                examples=self._examples.take(count * batch).reshape(count, batch),
                params=shared(self._run.model(self._state)) if joins else None,
                reply=self._replies[worker],
                life=int(self._lives[worker]),
                is_late=self._position > 0,
            )
            if joins or not self._run.pushes:
                view = shared(self._run.view(self._state, np.int32(worker)))
                order = order._replace(view=view)
            self._sent[worker] += bytes_of((order.params, order.reply, order.view))
            # After a message that was not finite, a server has no reply: what was read is older.
            sends = joins or order.reply is not None or jax.tree.leaves(order.view)
            if self._run.pushes or sends:
                self._read[worker] = self._position
            self._new[worker], self._replies[worker] = False, None
            self._work[worker] = Work(order, self._read[worker])
            self._clock.begin(int(worker), order)

    def _record(self, happening: Happening, **values: Any) -> None:
        kind, seconds = happening.kind, float(happening.seconds)
        self._rows += 1
        self._on_row(Row(kind, seconds, happening.worker, **values))  # type: ignore[arg-type]

    # Checkpoints.

    def _save(self, seconds: float) -> None:
        is_due = seconds - self._saved >= self._limits.checkpoint_seconds
        if self._checkpoints is None or not is_due or self._position == self._saved_position:
            return
        self._saved, self._saved_position = seconds, self._position
        outstanding = [work.order.examples for work in self._work if work is not None]
        position = {
            "examples": self._examples.position(outstanding),
            "numbers": self._numbers.tolist(),
            "lives": self._lives.tolist(),
            "trained": self._trained,
            "position": self._position,
            "rows": self._rows,
            "unsent": json.dumps(self._unsent()),  # A loss may be NaN.
            "version": self._version,
            "seconds": self._clock.seconds(),
        }
        self._checkpoints.save(self._position, self._state, position)

    def _restore(self, checkpoints: Checkpoints) -> None:
        _, self._state, position = checkpoints.restore(self._state)
        self._examples.restore(position["examples"])
        self._numbers[:], self._lives[:] = position["numbers"], position["lives"]
        self._trained, self._position = position["trained"], position["position"]
        self._rows, self._saved = position["rows"], position["seconds"]
        self._saved_position, self._version = self._position, position["version"]
        self._dropped = int(getattr(self._state, "dropped", 0))
        self._clock.resume(self._saved)
        for row in map(row_of, json.loads(position["unsent"])):
            self._on_row(row)
        self._restored(Happening("restored", np.float32(self._saved)))
