"""A clock in this process, whose workers are slow, die and return as a seed says."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.asynchronous._messages import Happening, Job, Order, Row
from jaxcomm.asynchronous._owner import Limits, Owner
from jaxcomm.asynchronous._worker import Programs, Worker
from jaxcomm.synchronization.events import Policy

WORKERS, EXAMPLES, BATCH = 4, 40, 2
INPUTS = np.random.default_rng(0).normal(size=(EXAMPLES, 3)).astype(np.float32)
TARGETS = INPUTS @ np.float32([1, 2, 3])
START = {"w": np.zeros(3, np.float32)}


def loss(params: Any, batch: Any) -> jax.Array:
    inputs, targets = batch
    return jnp.mean((inputs @ params["w"] - targets) ** 2)


def batches(numbers: np.ndarray, worker: int) -> Any:
    return INPUTS[numbers], TARGETS[numbers]


class Simulated:
    """A clock with exponential times; worker 3 is four times as slow."""

    def __init__(self, job: Job, seed: int = 0, deaths: float = 0.0) -> None:
        self.programs, self.deaths = Programs(job), deaths
        self.draw, self.now = np.random.default_rng(seed), np.float32(0)
        self.starting: list[int] = []
        self.workers: dict[int, Any] = {}
        self.orders: dict[int, Order] = {}
        self.due: dict[int, np.float32] = {}
        self.heard: dict[int, Any] = {}

    def worker(self, index: int) -> Any:
        return Worker(self.programs, index)

    def seconds(self) -> float:
        return float(self.now)

    def resume(self, seconds: float) -> None:
        self.now = np.float32(seconds)

    def start(self, worker: int) -> None:
        self.starting.append(worker)

    def begin(self, worker: int, order: Order) -> None:
        took = (1 + self.draw.exponential()) * len(order.examples) * (4 if worker == 3 else 1)
        self.orders[worker], self.due[worker] = order, self.now + np.float32(took)

    def hear(self, worker: int, version: int, view: Any) -> None:
        self.heard[worker] = version, view

    def next(self, due: float) -> Happening:
        if self.starting:
            worker = self.starting.pop(0)
            self.workers[worker] = self.worker(worker)
            return Happening("joined", self.now, worker)
        worker = min(self.due, key=lambda worker: self.due[worker])
        if due < self.due[worker]:
            self.now = np.nextafter(np.float32(due), np.float32(np.inf))
            return Happening("time", self.now)
        self.now = self.due.pop(worker)
        if self.draw.random() < self.deaths:
            self.heard.pop(worker, None)
            return Happening("left", self.now, worker, reason="killed")
        report = self.workers[worker].run(
            self.orders[worker], lambda number: self.heard.pop(worker, None)
        )
        return Happening("arrived", self.now, worker, report)


def job_of(policy: Policy, **changes: Any) -> Job:
    return Job(loss, batches, policy, WORKERS, 0, BATCH, 1, False, None, EXAMPLES)._replace(
        **changes
    )


def limits_of(updates: int, **changes: Any) -> Limits:
    return Limits(updates * BATCH, np.inf, WORKERS, np.inf)._replace(**changes)


def trained(
    job: Job,
    limits: Limits,
    clock: Callable[..., Any] = Simulated,
    *args: Any,
    start: Any = START,
    **options: Any,
) -> tuple[Owner, list[Row]]:
    """The owner at the end of a run, and the rows of the run."""
    rows: list[Row] = []
    owner = Owner(job, start, limits, clock(job, *args, **options), on_row=rows.append)
    owner.run()
    return owner, rows
