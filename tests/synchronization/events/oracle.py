"""Policies in NumPy, from their equations, and a replay of their events on a clock in float64."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.synchronization.events.problem import (
    CURVATURE,
    MINIMUM,
    SIZE,
    START,
    WORKERS,
    gradient,
)

BYTES = 4 * SIZE
Messages = tuple[int, int, int, int]  # uploads and their bytes, downloads and their bytes


@dataclasses.dataclass
class Happened:
    """What an oracle says of one event."""

    worker: int
    number: int
    staleness: int
    seconds: float
    messages: Messages


def replay(
    rule: Any,
    times: Callable[[int, int], float],
    events: int,
    travel: Callable[[Messages], float] = lambda messages: 0.0,
) -> list[Happened]:
    """The events of a rule, whose state changes on the way."""
    idle = {*range(WORKERS)} - {*rule.begins({*range(WORKERS)})}
    due = {j: times(j, 0) for j in range(WORKERS)}
    arrived, began, finished = [0.0] * WORKERS, [0] * WORKERS, [0] * WORKERS
    releases, seen = 1, []
    for index in range(events):
        i = min({*range(WORKERS)} - idle, key=lambda j: (due[j], j))
        now, staleness = due[i], index - began[i]
        messages = rule.finish(i, finished[i], staleness, now)
        seen.append(Happened(i, finished[i], staleness, now, messages))
        arrived[i], finished[i] = now + travel(messages), finished[i] + 1
        idle.add(i)
        opening = max(arrived[j] for j in idle)
        beginning = rule.begins(idle)
        for j in beginning:
            due[j] = opening + times(j, releases if rule.restarts else finished[j])
            began[j] = index + 1
        idle -= {*beginning}
        releases += bool(beginning)
    return seen


class Rule:
    """Workers that never wait."""

    restarts = False

    def begins(self, idle: set[int]) -> set[int]:
        return {*idle}


class Backup(Rule):
    """The first n - b gradients of a step make it."""

    def __init__(self, rate: float, backups: int, aborts: bool = False) -> None:
        self.x, self.rate, self.wanted = START.copy(), rate, WORKERS - backups
        self.gradients: list[np.ndarray] = []
        self.step, self.next_step, self.restarts = 0, [0] * WORKERS, aborts
        self.dropped, self.used = 0, []

    def finish(self, i: int, number: int, staleness: int, now: float) -> Messages:
        if self.next_step[i] == self.step:
            self.gradients.append(gradient(self.x, i, number))
            self.used.append((self.step, i))
            self.next_step[i] += 1
        else:
            self.dropped += 1
            self.next_step[i] = self.step
        if len(self.gradients) == self.wanted:
            self.x = self.x - self.rate * np.mean(self.gradients, axis=0)
            self.gradients, self.step = [], self.step + 1
            self.next_step = [self.step] * WORKERS if self.restarts else self.next_step
        return 1, BYTES, 1, BYTES

    def begins(self, idle: set[int]) -> set[int]:
        if self.restarts:
            return set() if self.gradients else {*range(WORKERS)}
        return {j for j in idle if self.next_step[j] <= self.step}


class StaleSynchronous(Rule):
    """Every update with its worker and clock; reads add up those that they may see."""

    def __init__(self, rate: float, staleness: int) -> None:
        self.rate, self.staleness = rate, staleness
        self.updates: dict[tuple[int, int], np.ndarray] = {}
        self.clocks = [0] * WORKERS

    def read(self, i: int) -> np.ndarray:
        certain = self.clocks[i] - self.staleness - 1
        assert all((j, k) in self.updates for j in range(WORKERS) for k in range(certain + 1))
        seen = [u for (j, k), u in self.updates.items() if k <= certain or j == i]
        return START + sum(seen, start=np.zeros(SIZE)) / WORKERS

    def finish(self, i: int, number: int, staleness: int, now: float) -> Messages:
        self.updates[i, self.clocks[i]] = -self.rate * gradient(self.read(i), i, number)
        self.clocks[i] += 1
        return 1, BYTES, 1, BYTES

    def begins(self, idle: set[int]) -> set[int]:
        return {j for j in idle if min(self.clocks) >= self.clocks[j] - self.staleness}

    @property
    def x(self) -> np.ndarray:
        return START + sum(self.updates.values(), start=np.zeros(SIZE)) / WORKERS


class Server(Rule):
    """Gradients at what a worker has read, with a weight."""

    def __init__(self, rate: float, weight: Callable[[int], float] = lambda staleness: 1.0) -> None:
        self.x, self.rate, self.weight = START.copy(), rate, weight
        self.read = [START.copy() for _ in range(WORKERS)]

    def finish(self, i: int, number: int, staleness: int, now: float) -> Messages:
        self.x = self.x - self.rate * self.weight(staleness) * gradient(self.read[i], i, number)
        self.read[i] = self.x
        return 1, BYTES, 1, BYTES


class Elastic(Rule):
    """A center and workers, with Nesterov's momentum if it is not 0."""

    def __init__(self, rate: float, elasticity: float, period: int, momentum: float = 0.0) -> None:
        self.x, self.rate, self.elasticity = START.copy(), rate, elasticity
        self.period, self.momentum = period, momentum
        self.own = np.tile(START, (WORKERS, 1))
        self.velocity = np.zeros((WORKERS, SIZE))

    def finish(self, i: int, number: int, staleness: int, now: float) -> Messages:
        g = gradient(self.own[i] + self.momentum * self.velocity[i], i, number)
        self.velocity[i] = self.momentum * self.velocity[i] - self.rate * g
        due = number % self.period == 0
        pull = self.elasticity * (self.own[i] - self.x) * due
        self.own[i] += self.velocity[i] - pull
        self.x = self.x + pull
        return (1, BYTES, 1, BYTES) if due else (0, 0, 0, 0)


class Pairs(Rule):
    """Averages with partners that were drawn before."""

    def __init__(self, rate: float, partners: list[list[int]]) -> None:
        self.rate, self.partners = rate, partners
        self.own = np.tile(START, (WORKERS, 1))
        self.read = self.own.copy()

    def finish(self, i: int, number: int, staleness: int, now: float) -> Messages:
        j = self.partners[number][i]
        self.own[[i, j]] = (self.own[i] + self.own[j]) / 2
        self.own[i] -= self.rate * gradient(self.read[i], i, number)
        self.read[i] = self.own[i]
        return 1, BYTES, 1, BYTES

    @property
    def x(self) -> np.ndarray:
        return self.own.mean(axis=0)


class Consensus(Rule):
    """All iterates of ADMM on a graph; duals are sums over the iterates so far."""

    def __init__(
        self, neighbors: list[list[int]], penalty: float, colors: list[int] | None = None
    ) -> None:
        self.neighbors, self.penalty = neighbors, penalty
        self.colors = colors or [0] * WORKERS
        self.proximal = colors is None
        self.iterates = [[START.copy()] for _ in range(WORKERS)]

    def number(self, i: int) -> int:
        return len(self.iterates[i]) - 1

    def needed(self, i: int, j: int) -> int:
        return self.number(i) + (self.colors[j] < self.colors[i])

    def dual(self, i: int) -> np.ndarray:
        differences = [
            self.iterates[i][k] - self.iterates[j][k]
            for j in self.neighbors[i]
            for k in range(1, self.number(i) + 1)
        ]
        return self.penalty * sum(differences, start=np.zeros(SIZE))

    def finish(self, i: int, number: int, staleness: int, now: float) -> Messages:
        linear, curvature = self.dual(i), self.penalty * len(self.neighbors[i])
        for j in self.neighbors[i]:
            linear = linear - self.penalty * self.iterates[j][self.needed(i, j)]
        if self.proximal:
            linear = linear - curvature * self.iterates[i][-1]
            curvature = 2 * curvature
        self.iterates[i].append((CURVATURE[i] * MINIMUM[i] - linear) / (CURVATURE[i] + curvature))
        degree = len(self.neighbors[i])
        return degree, degree * BYTES, 0, 0

    def begins(self, idle: set[int]) -> set[int]:
        return {
            i for i in idle if all(self.number(j) >= self.needed(i, j) for j in self.neighbors[i])
        }

    @property
    def x(self) -> np.ndarray:
        return np.mean([iterates[-1] for iterates in self.iterates], axis=0)


def on_grid(x: np.ndarray, bits: int) -> np.ndarray:
    """LAQ's nearest point, leaf by leaf."""
    parts = []
    for leaf in (x[:4], x[4:]):
        radius, step = np.abs(leaf).max(), 1 / (2**bits - 1)
        codes = np.floor((leaf + radius) / (2 * step * radius) + 0.5)
        parts.append(2 * step * radius * codes - radius)
    return np.concatenate(parts)


class Lazy(Rule):
    """Last uploads, with a threshold by past steps; of LAG-WK, LAQ with bits, LAG-PS if asked."""

    def __init__(
        self, rate: float, threshold: float, memory: int, max_skip: int, *,
        bits: int | None = None, smoothness: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        self.x, self.rate, self.memory, self.max_skip = START.copy(), rate, memory, max_skip
        self.weights = [threshold / memory] * memory
        self.bits, self.smoothness = bits, smoothness
        self.uploads = np.zeros((WORKERS, SIZE))
        self.read = np.tile(START, (WORKERS, 1))
        self.path = [START.copy()] * (memory + 1)
        self.skipped, self.errors = [max_skip] * WORKERS, [0.0] * WORKERS
        self.expected = {*range(WORKERS)}

    def limit(self) -> float:
        moves = [np.sum((a - b) ** 2) for a, b in zip(self.path[1:], self.path, strict=False)]
        return sum(w * m for w, m in zip(self.weights, moves[::-1], strict=False)) / self.rate**2

    def step(self) -> None:
        self.x = self.x - self.rate * self.uploads.mean(axis=0)
        self.path = [*self.path, self.x][-self.memory - 1 :]

    def finish(self, i: int, number: int, staleness: int, now: float) -> Messages:
        change = CURVATURE[i] * (self.x - MINIMUM[i]) - self.uploads[i]
        sent = change if self.bits is None else on_grid(change, self.bits)
        error = np.sum((sent - change) ** 2)
        size, norm = BYTES, np.sum(sent**2)
        if self.bits is None:
            uploads = norm >= self.limit() or self.smoothness is not None
        else:
            uploads = norm > self.limit() + 3 * (error + self.errors[i])
            size = 4 * sum(-(-count // (32 // self.bits)) for count in (4, 2)) + 2 * 4
        uploads |= self.skipped[i] >= self.max_skip
        self.expected -= {i}
        if uploads:
            self.uploads[i] += sent
            self.read[i], self.skipped[i], self.errors[i] = self.x, 0, error
        else:
            self.skipped[i] += 1
        while not self.expected:
            self.step()
            self.expected = {j for j in range(WORKERS) if self.asks(j)}
            if self.smoothness is not None:
                others = {*range(WORKERS)} - self.expected
                self.skipped = [s + (j in others) for j, s in enumerate(self.skipped)]
        if self.smoothness is not None:
            return 1, size, 1, BYTES
        # Workers decide: by a limit, and in the same round.
        return uploads, 5 + size * uploads, 1, BYTES + 8

    def asks(self, j: int) -> bool:
        if self.smoothness is None:
            return True
        distance = self.smoothness[j] ** 2 * np.sum((self.read[j] - self.x) ** 2)
        return distance >= self.limit() or self.skipped[j] >= self.max_skip

    def begins(self, idle: set[int]) -> set[int]:
        return idle & self.expected


class VarianceReduced(Rule):
    """Asynchronous proximal SVRG without rounding."""

    def __init__(self, rate: float, steps: int, shrink: float) -> None:
        self.rate, self.steps, self.shrink = rate, steps, shrink
        self.x = START.copy()
        self.new_epoch()

    def new_epoch(self) -> None:
        self.snapshot, self.full = self.x.copy(), []
        self.read = [self.x] * WORKERS
        self.done = 0

    def finish(self, i: int, number: int, staleness: int, now: float) -> Messages:
        if len(self.full) < WORKERS:
            self.full.append(CURVATURE[i] * (self.snapshot - MINIMUM[i]))
            return 1, BYTES, 1, BYTES
        change = gradient(self.read[i], i, number) - gradient(self.snapshot, i, number)
        x = self.x - self.rate * (change + np.mean(self.full, axis=0))
        self.x = np.sign(x) * np.maximum(np.abs(x) - self.rate * self.shrink, 0)
        self.read[i] = self.x
        self.done += 1
        if self.done == self.steps:
            self.new_epoch()
        return 1, BYTES + 2 * 4, 1, BYTES

    def begins(self, idle: set[int]) -> set[int]:
        if len(self.full) < WORKERS:
            return set() if self.full else idle
        return idle if self.done + WORKERS - len(idle) < self.steps else set()


class Decoupled(Rule):
    """A list of displacements that wait for a merge, by Nesterov's momentum."""

    def __init__(
        self, rate: float, outer_rate: float, momentum: float, period: int, quorum: int,
        grace: float, tokens: list[float],
    ) -> None:  # fmt: skip
        self.rate, self.outer_rate, self.momentum = rate, outer_rate, momentum
        self.period, self.quorum, self.grace, self.tokens = period, quorum, grace, tokens
        self.x, self.velocity = START.copy(), np.zeros(SIZE)
        self.own, self.base = np.tile(START, (WORKERS, 1)), np.tile(START, (WORKERS, 1))
        self.waiting: list[tuple[int, float, np.ndarray]] = []
        self.deadline: float | None = None
        self.version, self.seen = 0, [0] * WORKERS
        self.sizes: list[int] = []

    def merge(self) -> None:
        total = sum(weight for _, weight, _ in self.waiting)
        descent = -sum(weight * d for _, weight, d in self.waiting) / total
        self.velocity = self.momentum * self.velocity + descent
        self.x = self.x - self.outer_rate * (descent + self.momentum * self.velocity)
        self.sizes.append(len({i for i, _, _ in self.waiting}))
        self.waiting, self.deadline, self.version = [], None, self.version + 1

    def finish(self, i: int, number: int, staleness: int, now: float) -> Messages:
        self.own[i] -= self.rate * gradient(self.own[i], i, number)
        if self.deadline is not None and now > self.deadline:
            self.merge()
        receives = self.seen[i] < self.version
        if receives:
            self.own[i] += self.x - self.base[i]
            self.base[i], self.seen[i] = self.x, self.version
        sends = (number + 1) % self.period == 0
        if sends:
            tokens = self.period * self.tokens[i]
            self.waiting.append((i, tokens * tokens / self.period, self.own[i] - self.base[i]))
            self.base[i] = self.own[i]
        learners = {j for j, _, _ in self.waiting}
        if sends and len(learners) >= self.quorum and self.deadline is None:
            self.deadline = now + self.grace
        if len(learners) == WORKERS:
            self.merge()
        return sends, BYTES * sends, receives, (BYTES + 4) * receives  # With the merge's number.


class SparseServer(Server):
    """Gradients of which each leaf's largest coordinate is sent, with error feedback."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self.residual = np.zeros((WORKERS, SIZE))

    def finish(self, i: int, number: int, staleness: int, now: float) -> Messages:
        wanted = gradient(self.read[i], i, number) + self.residual[i]
        sent = np.zeros(SIZE)
        for leaf in (slice(0, 4), slice(4, 6)):
            largest = leaf.start + np.abs(wanted[leaf]).argmax()
            sent[largest] = wanted[largest]
        self.residual[i] = wanted - sent
        self.x = self.x - self.rate * sent
        self.read[i] = self.x
        return 1, 2 * (4 + 4), 1, BYTES
