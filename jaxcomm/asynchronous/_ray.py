"""Ray: workers and the owner as actors, and the clock that waits for them."""

import collections
import contextlib
import importlib
import importlib.metadata
import math
import statistics
import threading
import time
from typing import Any

import numpy as np

from jaxcomm._contract import PyTree
from jaxcomm.asynchronous._coordinator import Coordinator
from jaxcomm.asynchronous._islands import IslandWorker
from jaxcomm.asynchronous._messages import Happening, Job, Order, Report, Row, hosted
from jaxcomm.asynchronous._owner import Limits, Owner
from jaxcomm.asynchronous._pairs import PairPrograms, PairWorker, Shown
from jaxcomm.asynchronous._worker import Programs, Worker
from jaxcomm.synchronization.events._messages import bytes_of

LEAST = 2, 59
_RECENT = 32  # pieces of work of a worker that its deadline looks back to
_LARGE = 2**16  # bytes, from which arrays for several workers are stored once
_SECONDS_TO_SAY = 2.0  # what a worker knows at once
_SECONDS_AWAY = 0.5  # longer than an owner computes between two messages
_SECONDS_TO_SHOW = 60.0  # its parameters at the end, if no other hangs


def require_ray() -> Any:
    """The module, of a version that works."""
    try:
        ray = importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise ImportError(
            '`jaxcomm.asynchronous.train` needs Ray: `pip install "jaxcomm[ray]"`.'
        ) from error
    version = importlib.metadata.version("ray")
    if tuple(map(int, version.split(".")[:2])) < LEAST:
        least = ".".join(map(str, LEAST))
        raise ImportError(
            f"`jaxcomm.asynchronous.train` needs Ray {least} or newer, not {version}."
        )
    return ray


class WorkerProcess:
    """The actor of a worker. Its second thread takes what it hears between gradients."""

    def __init__(self) -> None:
        self._heard: collections.deque[tuple[int, PyTree]] = collections.deque(maxlen=1)

    def ready(self, job: Job, index: int, options: dict[str, Any], patience: float) -> None:
        """Makes the programs, or an owner that will start the workers of an island."""
        if job.island is None:
            self._worker: Any = Worker(Programs(job), index)
        else:
            put = require_ray().put
            self._worker = IslandWorker(
                job, index, lambda inner: RayClock([put(inner)], inner, [options], patience)
            )

    def run(self, order: Order, params: PyTree, reply: PyTree, view: PyTree) -> Report:
        """Computes."""
        whole = order._replace(params=params, reply=reply, view=view)
        report: Report = self._worker.run(
            whole, lambda number: self._heard.pop() if self._heard else None
        )
        return report

    def busy(self) -> float:
        """As of those that meet, for an island: it waits for its workers, and looks after them."""
        return 0.0

    def hear(self, version: int, view: PyTree) -> None:
        """Keeps the newest view until the next gradient."""
        self._heard.append((version, view))


class PairProcess:
    """The actor of a worker without an owner. Its other threads answer the other workers."""

    def ready(self, job: Job, index: int, options: dict[str, Any], patience: float) -> None:
        """Makes the programs."""
        self._worker = PairWorker(PairPrograms(job), index)

    def run(
        self, order: Order, params: PyTree, reply: PyTree, view: PyTree, actors: dict[int, Any]
    ) -> Report:
        """Computes and meets."""
        peers = {index: RayPeer(actor) for index, actor in actors.items()}
        return self._worker.run(order._replace(params=params), peers)

    def busy(self) -> float:
        """The seconds since it last waited for another worker."""
        return self._worker.busy()

    def has_worked(self) -> bool:
        """Whether it has computed a gradient."""
        return self._worker.has_worked

    def meet(self, shown: Shown, number: int) -> Shown | None:
        """As of :class:`Peer`."""
        return self._worker.meet(shown, number)

    def host(self, actor: Any, number: int) -> None:
        """As of :class:`Peer`, with the actor of the worker that asks."""
        self._worker.host(RayPeer(actor), number)

    def show(self) -> Shown | None:
        """As of :class:`Peer`."""
        return self._worker.show()


class RayPeer:
    """Another actor."""

    def __init__(self, actor: Any) -> None:
        self._ray, self._actor = require_ray(), actor

    def meet(self, shown: Shown, number: int) -> Shown | None:
        """As of :class:`Peer`."""
        return self._answer(self._actor.meet, shown, number)

    def host(self, worker: int, number: int) -> None:
        """As of :class:`Peer`."""
        own = self._ray.get_runtime_context().current_actor
        self._answer(self._actor.host, own, number)

    def show(self) -> Shown | None:
        """As of :class:`Peer`."""
        return self._answer(self._actor.show)

    def _answer(self, method: Any, *args: Any) -> Any:
        try:
            return self._ray.get(method.remote(*args))
        except _deaths(self._ray):
            return None


def _deaths(ray: Any) -> tuple[type[Exception], ...]:
    """What Ray raises if a process has died."""
    of_ray = ray.exceptions
    return (
        *(of_ray.RayActorError, of_ray.WorkerCrashedError),
        *(of_ray.OutOfMemoryError, of_ray.ObjectLostError),
    )


class RayClock:
    """Real time, and real workers."""

    def __init__(
        self,
        reference: list[Any],
        job: Job,
        options: list[dict[str, Any]],
        patience: float,
        stopped: threading.Event | None = None,
    ) -> None:
        self._ray = require_ray()
        self._job, self._options = reference[0], options
        self._meets, self._is_upper = job.policy.pairs is not None, job.island is not None
        # Each other worker may wait here in up to three calls.
        threads = 3 * job.workers + 4 if self._meets else 2
        process = PairProcess if self._meets else WorkerProcess
        self._process = self._ray.remote(max_concurrency=threads)(process)
        self._patience, self._origin = patience, time.monotonic()
        self._actors: dict[int, Any] = {}
        self._waiting: dict[Any, int] = {}  # The worker of each reference that is waited for.
        self._since: dict[int, float] = {}
        self._returned = 0.0  # when `next` did
        self._took: dict[int, collections.deque[float]] = {}  # of those that have joined
        self._compiled: set[int] = set()  # those whose programs are, after their first work
        self._firsts: collections.deque[float] = collections.deque(maxlen=_RECENT)
        self._starts: collections.deque[float] = collections.deque(maxlen=_RECENT)
        self._stored: collections.deque[tuple[PyTree, Any]] = collections.deque(maxlen=4)
        self._stopped = stopped or threading.Event()

    def seconds(self) -> float:
        """The time since the beginning."""
        return time.monotonic() - self._origin

    def resume(self, seconds: float) -> None:
        """Sets the time."""
        self._origin = time.monotonic() - seconds

    def start(self, worker: int) -> None:
        """Starts the actor of a worker."""
        options = self._options[worker % len(self._options)]
        # The owner of an island computes little, on the machine of its workers.
        own = {**options, "num_cpus": 0, "num_gpus": 0} if self._is_upper else options
        self._actors[worker] = actor = self._process.options(**own).remote()
        self._wait(worker, actor.ready.remote(self._job, worker, options, self._patience))

    def begin(self, worker: int, order: Order) -> None:
        """Sends an order."""
        parts = tuple(map(self._object, (order.params, order.reply, order.view)))
        bare = order._replace(params=None, reply=None, view=None)
        if self._meets:
            others = self._took.keys() - {worker}
            parts = *parts, {other: self._actors[other] for other in sorted(others)}
        self._wait(worker, self._actors[worker].run.remote(bare, *parts))

    def hear(self, worker: int, version: int, view: PyTree) -> None:
        """Sends a view, and does not wait for its arrival."""
        self._actors[worker].hear.remote(version, self._object(view))

    def next(self, due: float) -> Happening:
        """Waits for what happens next, or for the time `due`."""
        # No worker was silent while the owner did not listen, such as one that itself waits.
        now = self.seconds()
        if (away := now - self._returned) > _SECONDS_AWAY:
            for worker in self._took.keys() & self._since.keys():
                self._since[worker] = min(self._since[worker] + away, now)
        try:
            return self._next(due)
        finally:
            self._returned = self.seconds()

    def _next(self, due: float) -> Happening:
        while not self._stopped.is_set():
            wait = min([due, self.seconds() + 0.5, *map(self._deadline, self._since)])
            references = list(self._waiting)
            if not references:
                raise RuntimeError("All workers wait for each other: no message can arrive.")
            done, _ = self._ray.wait(references, timeout=max(wait - self.seconds(), 0))
            if done:
                return self._happened(done[0])
            if self._meets and not self._firsts:
                self._ask_for_firsts()
            for worker, since in self._since.items():
                if self.seconds() > self._deadline(worker) and self._is_silent(worker):
                    return self._left(worker, f"silent for {self.seconds() - since:.1f} s")
            now = self.seconds()
            # The owner compares the time with `due` in float32.
            if np.float32(now) > np.float32(due):
                return Happening("time", np.float32(now))
        return Happening("stopped", np.float32(self.seconds()))

    def _happened(self, reference: Any) -> Happening:
        worker = self._waiting[reference]
        try:
            report = self._ray.get(reference)
        except _deaths(self._ray) as error:
            return self._left(worker, str(error).splitlines()[0])
        del self._waiting[reference]
        took = self.seconds() - self._since.pop(worker)
        if report is None:
            self._starts.append(took)
            self._took[worker] = collections.deque(maxlen=_RECENT)
            self._compiled.discard(worker)
            return Happening("joined", np.float32(self.seconds()), worker)
        if worker in self._compiled:
            # Of those that meet, without the time in which they wait for each other.
            longer = report.seconds if self._meets else max(took, report.seconds)
            self._took[worker].append(longer)
        else:
            self._firsts.append(took)
        self._compiled.add(worker)
        return Happening("arrived", np.float32(self.seconds()), worker, report)

    def collected(self) -> list[Happening]:
        """The parameters of those that answer."""
        # While one hangs, those that wait for it cannot answer.
        asked = {self._actors[worker].busy.remote(): worker for worker in self._took}
        for reference in asked.keys() - self._answers(asked):
            self._ray.kill(self._actors.pop(asked[reference]), no_restart=True)
            del self._took[asked[reference]]
        asked = {self._actors[worker].show.remote(): worker for worker in sorted(self._took)}
        found = []
        for reference in self._answers(asked):
            with contextlib.suppress(*_deaths(self._ray)):
                shown = self._ray.get(reference)
                if shown is None:
                    continue
                # That of the parameters comes last.
                changes = sorted(shown.changes, key=lambda change: change.after == shown.version)
                report = Report(shown.params, changes=tuple(changes))
                now = np.float32(self.seconds())
                found.append(Happening("collected", now, asked[reference], report))
        return found

    def _answers(self, asked: dict[Any, int]) -> list[Any]:
        """Those that come soon."""
        if not asked:
            return []
        done, _ = self._ray.wait([*asked], num_returns=len(asked), timeout=_SECONDS_TO_SHOW)
        return done

    def _is_silent(self, worker: int) -> bool:
        """Whether a worker that is late is not so because it waited for another one."""
        if not (self._meets or self._is_upper):
            return True
        busy = self._asked(self._actors[worker].busy)
        if busy is None:
            return True
        self._since[worker] = max(self._since[worker], self.seconds() - busy)
        return self.seconds() > self._deadline(worker)

    def _ask_for_firsts(self) -> None:
        """Finds the time of a first gradient, also if all who have one wait for one that hangs."""
        for worker in self._took.keys() & self._since.keys():
            if self._asked(self._actors[worker].has_worked):
                self._firsts.append(self.seconds() - self._since[worker])

    def _asked(self, method: Any) -> Any:
        """What a worker answers at once; `None` if it does not."""
        try:
            return self._ray.get(method.remote(), timeout=_SECONDS_TO_SAY)
        except (self._ray.exceptions.GetTimeoutError, *_deaths(self._ray)):
            return None

    def _left(self, worker: int, reason: str) -> Happening:
        self._ray.kill(self._actors.pop(worker), no_restart=True)
        self._waiting = {ref: other for ref, other in self._waiting.items() if other != worker}
        del self._since[worker]
        self._took.pop(worker, None)
        return Happening("left", np.float32(self.seconds()), worker, reason=reason)

    def _wait(self, worker: int, reference: Any) -> None:
        self._waiting[reference], self._since[worker] = worker, self.seconds()

    def _deadline(self, worker: int) -> float:
        """When a worker is taken for dead: it could have started again meanwhile, and more.

        One that has not joined may wait for a free place in the cluster.
        """
        if worker not in self._took:
            return math.inf
        longest = max(self._took[worker] or self._firsts, default=math.inf)
        start = statistics.median(self._starts) if self._starts else math.inf
        return self._since[worker] + self._patience * longest + start

    def _object(self, tree: PyTree) -> Any:
        """What to pass to an actor: the arrays, or a reference to them if they are large."""
        if tree is None or bytes_of(tree) < _LARGE:
            return None if tree is None else hosted(tree)
        for known, reference in self._stored:
            if known is tree:
                return reference
        reference = self._ray.put(hosted(tree))
        self._stored.append((tree, reference))
        return reference


class OwnerProcess:
    """The actor of the owner. Its other threads answer questions meanwhile."""

    def __init__(
        self, reference: list[Any], options: list[dict[str, Any]], patience: float
    ) -> None:
        self._given = reference, options, patience
        self._stopped = threading.Event()
        self._rows: list[Row] = []
        self._sent, self._began = 0, False

    def run(self, params: PyTree, limits: Limits, directory: str | None) -> tuple[PyTree, bool]:
        """Trains; returns the parameters, and whether it was not stopped."""
        reference, options, patience = self._given
        job: Job = require_ray().get(reference[0])
        clock = RayClock(reference, job, options, patience, self._stopped)
        with contextlib.ExitStack() as stack:
            checkpoints = None
            if directory is not None:
                module = importlib.import_module("jaxcomm.checkpoint")
                checkpoints = stack.enter_context(module.Checkpoints(directory))
            unsent = lambda: self._rows[self._sent :]  # noqa: E731
            given = job, params, limits, clock, checkpoints, self._rows.append, unsent
            owner = Owner(*given) if job.policy.pairs is None else Coordinator(*given)
            self._began = True
            owner.run()
            return owner.model, not self._stopped.is_set()

    def is_authenticated(self) -> bool:
        """Whether the cluster lets in only those with its token."""
        name = "ray._private.authentication.authentication_utils"
        return bool(importlib.import_module(name).is_token_auth_enabled())

    def rows(self, begin: int) -> list[Row]:
        """The rows from a number on; the program has those before.

        The first are those of a checkpoint that the program may not have, and the row `restored`.
        """
        self._sent = begin
        return self._rows[begin:] if self._began else []

    def stop(self) -> None:
        """Lets `run` return."""
        self._stopped.set()
