"""The owner's part where workers have the parameters: it deals examples, and records changes."""

import collections
import graphlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jaxcomm._contract import PyTree
from jaxcomm.asynchronous._messages import (
    Change,
    Clock,
    Happening,
    Job,
    Order,
    Report,
    Row,
    Version,
)
from jaxcomm.asynchronous._owner import Limits, Owner
from jaxcomm.asynchronous._pairs import PairPrograms
from jaxcomm.asynchronous._replay import Replay
from jaxcomm.synchronization.events import Policy
from jaxcomm.synchronization.events._messages import sent
from jaxcomm.synchronization.events._pairs import Member

_NOBODY = "No worker is left, and the parameters were with them."

# The state is the first parameters, at which workers join. Messages have none.
_WATCHES = Policy(
    init=lambda params, workers: params,
    view=lambda state, worker: (),
    finish=lambda state, event, message: (state, (), sent()),
    model=lambda state: state,
    attend=lambda state, present, seconds: state,
)


class PairClock(Clock, Protocol):
    """A clock whose workers have the parameters."""

    def collected(self) -> list[Happening]:
        """Their parameters, as messages; the last change of each has made them."""


class Coordinator(Owner):
    """An owner without parameters; at the end, it collects those of the workers."""

    def __init__(
        self, job: Job, params: PyTree, limits: Limits, clock: PairClock, *others: Any
    ) -> None:
        super().__init__(job._replace(policy=_WATCHES), params, limits, clock, *others)
        self._shows, self._collected = clock.collected, list[PyTree]()
        self._known: dict[Version, int] = {}  # of each life, how many changes are; age 0
        self._apart: set[Version] = set()  # those that are after one that is not
        self._mean = PairPrograms.mean_of(job)
        self._holders: set[int] = set()  # those that have reported, and are there
        self._late: set[Version] = set()  # the first of lives that began when others had reported

    @property
    def model(self) -> PyTree:
        """The mean of the workers, as NumPy arrays."""
        return jax.tree.map(np.array, self._mean(self._collected, self._state))

    def run(self) -> None:
        """Runs until the end, or until the clock is stopped."""
        super().run()
        for happening in self._shows():
            assert happening.report is not None
            self._record(happening, changes=happening.report.changes)
            self._collected.append(happening.report.message)
        if not self._collected:
            raise RuntimeError(_NOBODY)

    def _arrived(self, happening: Happening) -> None:
        """Records each change once, of those that several workers know."""
        report = happening.report
        assert report is not None
        new = tuple(change for change in report.changes if self._is_new(change.after))
        self._require_holder(happening.worker, new)
        super()._arrived(happening._replace(report=report._replace(changes=new)))

    def _left(self, happening: Happening) -> None:
        self._holders.discard(happening.worker)
        super()._left(happening)

    def _begin(self, begins: Any) -> None:
        super()._begin(begins)
        for worker, order in self._orders().items():
            if order.is_late:
                self._late.add(Version(worker, order.life, 0))

    def _orders(self) -> dict[int, Order]:
        return {at: work.order for at, work in enumerate(self._work) if work is not None}

    def _require_holder(self, worker: int, new: Sequence[Change]) -> None:
        """Raises if a late worker has begun at the first parameters, and those of now are lost.

        The changes may be those of another worker, which the reporting one has met.
        """
        begins_again = any(change.after in self._late and change.other is None for change in new)
        is_held = self._holders or not all(order.is_late for order in self._orders().values())
        if begins_again and not is_held:
            raise RuntimeError(_NOBODY)
        self._holders.add(worker)

    def _is_new(self, version: Version) -> bool:
        life = version._replace(age=0)
        known = self._known.get(life, 0)
        if version.age < known or version in self._apart:
            return False
        self._apart.add(version)
        while (following := life._replace(age=known)) in self._apart:
            self._apart.remove(following)
            known += 1
        self._known[life] = known
        return True


class _Dealing(Replay):
    """Goes through the rows of a run, and computes nothing."""

    def __init__(self, job: Job, rows: Sequence[Row]) -> None:
        of_owner = [row for row in rows if row.kind != "collected"]
        super().__init__(job, of_owner)
        self.examples: dict[tuple[int, int, int], np.ndarray] = {}

    def worker(self, index: int) -> None:
        """Nothing."""

    def begin(self, worker: int, order: Order) -> None:
        """Keeps the examples."""
        (self.examples[worker, order.life, order.number],) = order.examples

    def run(self, row: Row) -> Report:
        """What has arrived."""
        return Report(None if row.outcome == "nonfinite" else (), row.loss, row.work_seconds)


def dealt(
    job: Job, params: PyTree, limits: Limits, rows: Sequence[Row]
) -> tuple[dict[tuple[int, int, int], np.ndarray], bool]:
    """The examples by worker, life and number of the gradient; and whether that was all."""
    job = job._replace(policy=_WATCHES)
    clock = _Dealing(job, rows)
    dealer = Owner(job, params, limits, clock)
    dealer.run()
    return clock.examples, dealer.is_done


def replayed(
    job: Job, params: PyTree, limits: Limits, rows: Sequence[Row]
) -> tuple[PyTree, list[Row], bool]:
    """The parameters of a run, its rows with the losses of now, and whether it was at its end."""
    examples, is_done = dealt(job, params, limits, rows)
    changes = {change.after: change for row in rows for change in row.changes}
    ends = [row.changes[-1].after for row in rows if row.kind == "collected"]
    if not ends:  # The rows end early.
        newest = {version.worker: version for version in sorted(changes)}
        ends = [*newest.values()]
    model, losses = rebuilt(job, params, changes, ends, examples)
    return model, [*_with_losses(rows, losses)], is_done


def rebuilt(
    job: Job,
    params: PyTree,
    changes: Mapping[Version, Change],
    ends: Sequence[Version],
    examples: Mapping[tuple[int, int, int], np.ndarray],
) -> tuple[PyTree, dict[tuple[int, int, int], float]]:
    """The mean of the versions `ends`, and the losses of all gradients before.

    Each version of a worker's parameters is made of its last one, and of one of another worker.
    """
    made_of: dict[Version, list[Version]] = {
        after: [
            *([after._replace(age=after.age - 1)] if after.age else []),
            *([change.other] if change.other else []),
        ]
        for after, change in changes.items()
    }
    reads = collections.Counter([*ends, *(of for all_of in made_of.values() for of in all_of)])
    programs = PairPrograms(job)
    members: dict[Version, Member] = {}
    losses: dict[tuple[int, int, int], float] = {}
    for version in graphlib.TopologicalSorter(made_of).static_order():
        _, other, number = changes[version]
        worker, life, age = version
        theirs = members[other].params if other else None
        if age == 0:
            member = programs.join(params if other is None else theirs, params)
        else:
            member = members[version._replace(age=age - 1)]
            if number < 0 and other is None:
                member = programs.read(member)
            elif number < 0:
                member = member._replace(params=programs.meet(theirs, member.params)[1])
            else:
                batch = programs.batches(examples[worker, life, number], worker)
                loss, gradient, _ = programs.gradient(
                    member.read, np.int32(worker), np.int32(number), batch
                )
                losses[worker, life, number] = float(loss)
                if other is not None:
                    member = member._replace(params=programs.meet(member.params, theirs)[0])
                member = programs.step(member, gradient)
        members[version] = member
        for of in made_of[version]:
            reads[of] -= 1
            if not reads[of]:
                del members[of]
    found = [members[version].params for version in ends] or [programs.join(params, params).params]
    model = programs.mean(found, params)
    return jax.tree.map(np.array, model), losses


def _with_losses(rows: Sequence[Row], losses: dict[tuple[int, int, int], float]) -> Iterator[Row]:
    lives: collections.Counter[int] = collections.Counter()
    for row in rows:
        lives[row.worker] += row.kind == "joined"
        place = row.worker, lives[row.worker] - 1, row.number
        is_used = row.kind == "arrived" and row.outcome == "used"
        yield row._replace(loss=losses[place]) if is_used else row
