"""Workers without an owner: each has parameters, and averages them with those of a neighbor."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._contract import PyTree
from jaxcomm.asynchronous._messages import Change, Job, Order, Report, Version, hosted
from jaxcomm.asynchronous._worker import everywhere, gradients, is_finite
from jaxcomm.synchronization._trees import narrow
from jaxcomm.synchronization.events._engine import key_of
from jaxcomm.synchronization.events._messages import bytes_of


class Shown(NamedTuple):
    """The parameters of a worker, as another sees them."""

    params: PyTree
    version: Version
    changes: tuple[Change, ...]  # that the owner may not know


class Peer(Protocol):
    """Another worker. What it is asked returns `None` if it has died or has no parameters yet."""

    def meet(self, shown: Shown, number: int) -> Shown | None:
        """Averages with parameters of a worker of lower index, which waits.

        Args:
          shown: The parameters of the other.
          number: Of the gradient for which the one that is asked wants the average; -1 if it is
            the other's.

        Returns:
          The average for the other, and the version of those that it was made of.
        """

    def host(self, worker: int, number: int) -> None:
        """Asks a worker of higher index to meet, for the gradient `number` of that worker."""

    def show(self) -> Shown | None:
        """Returns the parameters."""


class PairPrograms:
    """The compiled programs of a worker, which all workers of a process share."""

    def __init__(self, job: Job) -> None:
        pairs, gradient, place = job.policy.pairs, gradients(job), everywhere(job)
        assert pairs is not None

        def of_batch(read: PyTree, worker: jax.Array, number: jax.Array, batch: PyTree) -> Any:
            loss, found = gradient(read, batch, key_of(job.seed, worker, number))
            return loss, found, is_finite((loss, found))

        def partner(worker: jax.Array, number: jax.Array, present: jax.Array) -> jax.Array:
            return pairs.partner(worker, key_of(job.seed, worker, number), present)

        self.batches, self.workers = job.batches, job.workers
        self.gradient, self.partner = jax.jit(of_batch), jax.jit(partner)
        stays = partial(jax.jit, out_shardings=place)
        self.join = stays(lambda params, like: pairs.join(narrow(params, like)))
        self.meet, self.step = stays(pairs.meet), stays(pairs.step)
        self.read = stays(lambda own: own._replace(read=narrow(own.params, own.read)))
        self.mean = self.mean_of(job)

    @staticmethod
    def mean_of(job: Job) -> Callable[[list[PyTree], PyTree], PyTree]:
        """The mean of the parameters of workers, in the dtypes of a model."""
        pairs = job.policy.pairs
        assert pairs is not None

        @jax.jit
        def mean(params: list[PyTree], like: PyTree) -> PyTree:
            return pairs.mean(jax.tree.map(lambda *leaves: jnp.stack(leaves), *params), like)

        return mean


class PairWorker:
    """One worker, in whichever process it is.

    Of two that meet, the one of lower index locks its parameters, sends them to the other, and
    waits. So each waits only for one of higher index, and no circle of them waits for itself.
    """

    def __init__(self, programs: PairPrograms, index: int) -> None:
        self._programs, self._lock = programs, threading.Lock()
        self._member: Any = None
        self._version = Version(index, 0, 0)
        self._wants: tuple[int, PyTree] | None = None  # the number and the gradient of a meeting
        self._changes: dict[Version, Change] = {}  # that the owner may not know
        self._reported: tuple[Change, ...] = ()
        self._read_at = self._staleness = 0
        self._bytes = np.zeros(2, np.int64)  # sent and received since the last report
        self.has_worked = False  # whether it has computed a gradient
        self._waited = -math.inf  # until when, for another worker; infinite while it waits

    def run(self, order: Order, peers: Mapping[int, Peer]) -> Report:
        """Computes a gradient, averages with a neighbor, and takes a step.

        After a gradient that is not finite, it only reads its parameters again.
        """
        with self._waiting(), self._lock:
            for change in self._reported:
                if change.after != self._version:
                    self._changes.pop(change.after, None)
        if order.params is not None:
            self._join(order, peers)
        started = time.monotonic()
        index, number = self._version.worker, order.number
        (examples,) = order.examples
        batch = self._programs.batches(examples, index)
        loss, gradient, finite = self._programs.gradient(
            self._member.read, np.int32(index), np.int32(number), batch
        )
        finite, self.has_worked = bool(finite), True
        seconds = time.monotonic() - started
        if finite:
            self._meet(number, gradient, peers)
        else:
            self._read()
        with self._waiting(), self._lock:
            self._reported = tuple(self._changes.values())
            (up, down), self._bytes = self._bytes.tolist(), np.zeros(2, np.int64)
        message = () if finite else None
        return Report(
            message, float(loss), seconds, (), up, down, self._staleness, self._reported
        )  # fmt: skip

    def busy(self) -> float:
        """The seconds since it last waited for another worker."""
        return max(time.monotonic() - self._waited, 0.0)

    def meet(self, shown: Shown, number: int) -> Shown | None:
        """Averages, as of :class:`Peer`."""
        with self._lock:
            if self._member is None:
                return None
            before = self._version
            if number < 0:
                theirs, own = self._programs.meet(shown.params, self._member.params)
                self._change(self._member._replace(params=own), shown.version, -1)
            else:
                if self._wants is None or self._wants[0] != number:
                    return None
                own, theirs = self._programs.meet(self._member.params, shown.params)
                self._step(own, shown.version, *self._wants)
                self._wants = None
            self._learn(shown)
            return self._shown(theirs, before)

    def host(self, peer: Peer, number: int) -> None:
        """Meets a worker of higher index that asks for it."""
        with self._lock:
            if self._member is not None:
                shown = peer.meet(self._shown(self._member.params, self._version), number)
                if shown is not None:
                    self._learn(shown)
                    member = self._member._replace(params=shown.params)
                    self._change(member, shown.version, -1)

    def show(self) -> Shown | None:
        """The parameters."""
        with self._lock:
            if self._member is None:
                return None
            return self._shown(self._member.params, self._version)

    def _join(self, order: Order, peers: Mapping[int, Peer]) -> None:
        """Begins at the parameters of the run, or later at those of another worker."""
        shown = None
        if order.is_late:
            with self._waiting():
                shown = next(filter(None, (peer.show() for peer in peers.values())), None)
        with self._lock:
            params = order.params if shown is None else shown.params
            self._member = self._programs.join(params, order.params)
            self._version = Version(self._version.worker, order.life, -1)
            self._change(self._member, None if shown is None else shown.version, -1)
            if shown is not None:
                self._learn(shown)

    def _meet(self, number: int, gradient: PyTree, peers: Mapping[int, Peer]) -> None:
        """Averages with a neighbor, if one answers, and takes a step."""
        index, present = self._version.worker, np.zeros(self._programs.workers, bool)
        present[list(peers)] = True
        partner = int(self._programs.partner(np.int32(index), np.int32(number), present))
        if 0 <= partner < index:
            with self._waiting(), self._lock:
                self._wants = number, gradient
            with self._waiting():
                peers[partner].host(index, number)
            with self._waiting(), self._lock:
                alone, self._wants = self._wants is not None, None
                if alone:
                    self._step(self._member.params, None, number, gradient)
            return
        with self._waiting(), self._lock:
            shown, params, other = None, self._member.params, None
            if partner >= 0:
                shown = peers[partner].meet(self._shown(params, self._version), -1)
            if shown is not None:
                self._learn(shown)
                params, other = shown.params, shown.version
            self._step(params, other, number, gradient)

    def _step(self, params: PyTree, other: Version | None, number: int, gradient: PyTree) -> None:
        self._staleness = self._version.age - self._read_at
        member = self._programs.step(self._member._replace(params=params), gradient)
        self._change(member, other, number)
        self._read_at = self._version.age

    def _read(self) -> None:
        with self._waiting(), self._lock:
            self._staleness = self._version.age - self._read_at
            self._change(self._programs.read(self._member), None, -1)
            self._read_at = self._version.age

    def _change(self, member: Any, other: Version | None, number: int) -> None:
        self._member = member
        self._version = self._version._replace(age=self._version.age + 1)
        self._changes[self._version] = Change(self._version, other, number)

    def _learn(self, shown: Shown) -> None:
        self._changes.update({change.after: change for change in shown.changes})
        self._bytes[1] += bytes_of(shown.params)

    def _shown(self, params: PyTree, version: Version) -> Shown:
        self._bytes[0] += bytes_of(params)
        return Shown(hosted(params), version, tuple(self._changes.values()))

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self._waited = math.inf
        try:
            yield
        finally:
            self._waited = time.monotonic()
