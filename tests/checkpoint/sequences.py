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
      kind: "step", "save", "kill", "restore" or "resize".
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
        """The next program may have other workers; it restores, or starts again."""
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


def sequence(seed: int) -> Sequence:
    """A random sequence of 8 to 16 operations that ends with a step."""
    it = _Generator(seed)
    length = it.draw.randint(8, 16)
    workers = it.workers
    it.step()
    for _ in range(length):
        kinds = [it.step, it.save, it.kill, it.resize]
        it.draw.choices(kinds, [6, 5, 2, 1])[0]()
    it.step()
    return Sequence(seed, it.family, it.name, seed // SHARED % 2 == 1, workers, it.ops)
