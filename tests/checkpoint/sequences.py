"""Random sequences of {step, NaN, save, kill, restore, resize}, and what each must come to.

The generator keeps a history: the steps and changes of the workers that the state is the result of.
A kill without a checkpoint empties it, a restore brings back that of the checkpoint. A run that
does the history without interruption is the oracle.
"""

import random
from typing import NamedTuple

from tests.cases import CASES
from tests.cases._gossip import GOSSIP
from tests.cases._local import LOCAL

KEEP = 3
SHARED = 4  # So many seeds, one after the other, have one method, whose steps compile once.
ERRORS = 0.16  # The part of sequences that make one mistake.


class Event(NamedTuple):
    """A part of a history: a step with a batch, or a change of the workers.

    Attributes:
      kind: "step" or "resize".
      number: Of the batch.
      workers: After the event.
      spoiled: The worker whose gradient is NaN; -1: none.
    """

    kind: str
    number: int
    workers: int
    spoiled: int = -1


History = tuple[Event, ...]


class Op(NamedTuple):
    """What a program does.

    Attributes:
      kind: "step", "save", "kill", "restore" or "resize", or the name of a mistake.
      history: Afterwards.
      workers: Afterwards.
      steps: The checkpoints that there are afterwards.
    """

    kind: str
    history: History
    workers: int
    steps: tuple[int, ...]


class Sequence(NamedTuple):
    """A method by its family and name, and what is done with it."""

    seed: int
    family: str
    name: str
    on_mesh: bool
    workers: int
    ops: list[Op]

    def errs(self) -> bool:
        """Whether it makes a mistake, which must be a documented error and change nothing."""
        return any(op.kind in MISTAKES for op in self.ops)

    def kills(self) -> int:
        """How often the program is killed."""
        return sum(op.kind == "kill" for op in self.ops)


MISTAKES = {
    "save the same step": ("ValueError", "must be above"),
    "restore a step that is not there": ("FileNotFoundError", "There is no checkpoint of step"),
    "restore another method": ("CheckpointError", "of another model, method or version"),
    "save another method": ("CheckpointError", "of another model, method or version"),
    "restore other workers": ("CheckpointError", "pass `tx` and `workers`"),
}
"""The type of the error, and a part of its message."""

FAMILIES = (
    [("aggregator", case.name, (4, 3, 2)) for case in CASES]
    + [("gossip", case.name, (8, 4)) for case in GOSSIP]
    + [("local", case.name, (4, 3, 2)) for case in LOCAL]
)


class _Generator:
    """The state that the program will have."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        of_group = random.Random(f"method {seed // SHARED}")
        self.family, self.name, self.counts = of_group.choice(FAMILIES)
        self.workers = self.counts[0]
        self.history: History = ()
        self.saved: dict[int, History] = {}
        self.ops: list[Op] = []

    def add(self, kind: str) -> None:
        self.ops.append(Op(kind, self.history, self.workers, tuple(self.saved)))

    @property
    def done(self) -> int:
        return sum(event.kind == "step" for event in self.history)

    def other(self) -> int:
        return self.draw.choice([n for n in self.counts if n != self.workers])

    def step(self) -> None:
        spoiled = self.draw.randrange(self.workers) if self.draw.random() < 0.15 else -1
        self.history += (Event("step", self.done, self.workers, spoiled),)
        self.add("step")

    def save(self) -> None:
        if self.done <= max(self.saved, default=0):
            return self.step()
        self.saved[self.done] = self.history
        self.saved = dict([*self.saved.items()][-KEEP:])
        return self.add("save")

    def resize(self) -> None:
        if self.history:
            self.workers = self.other()
            self.history += (Event("resize", self.done, self.workers),)
            self.add("resize")

    def kill(self) -> None:
        """The next program may have other workers; it restores, or begins anew."""
        if self.draw.random() < 0.3:
            self.workers = self.other()
        self.history = ()
        self.add("kill")
        if self.saved:
            self.history = self.saved[max(self.saved)]
            saved_by = self.history[-1].workers
            if saved_by != self.workers:
                self.history += (Event("resize", max(self.saved), self.workers),)
            self.add("restore")

    def mistake(self) -> None:
        possible = ["restore a step that is not there"]
        if self.saved:
            possible += ["save the same step", "restore another method"]
            possible += ["save another method"]
            if self.family != "aggregator":  # Not all of those have state that differs by worker.
                possible += 12 * ["restore other workers"]
        self.add(self.draw.choice(possible))


def sequence(seed: int) -> Sequence:
    """A random sequence of 8 to 16 operations that ends with a step."""
    it = _Generator(seed)
    length = it.draw.randint(8, 16)
    errs_at = it.draw.randrange(4, length) if it.draw.random() < ERRORS else -1
    workers = it.workers
    it.step()
    for number in range(length):
        if number == errs_at:
            it.mistake()
        kinds = [it.step, it.save, it.kill, it.resize]
        it.draw.choices(kinds, [6, 5, 2, 1])[0]()
    it.step()
    return Sequence(seed, it.family, it.name, seed // SHARED % 2 == 1, workers, it.ops)
