"""Runs of the rows, each compiled once."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.synchronization import Straggler, events
from jaxcomm.synchronization.events._engine import Progress, Record
from jaxcomm.synchronization.events._messages import Sent
from tests.synchronization.events import oracle, problem
from tests.synchronization.events.rows import ROWS, Row

EVENTS = 60


class Run(NamedTuple):
    """The same events, simulated and replayed."""

    progress: Progress
    records: Record
    model: np.ndarray
    rule: Any
    happened: list[oracle.Happened]


def times_of(straggler: Straggler, seed: int = 0, numbers: int = EVENTS + 2) -> np.ndarray:
    """The seconds of gradient k of each worker, [numbers, workers]."""
    key = jax.random.key(seed, impl="threefry2x32")
    draw = lambda k: straggler.sample(key, k, (problem.WORKERS, 1))[:, 0]  # noqa: E731
    return np.asarray(jax.vmap(draw)(jnp.arange(numbers)), np.float64)


@functools.cache
def run_of(row: Row) -> Run:
    """The events of a row."""
    factor = np.float32(row.seconds_per_byte)

    def travel(sent: Sent) -> jax.Array:
        return (sent.upload_bytes + sent.download_bytes).astype(jnp.float32) * factor

    loop = events.event_loop(
        row.policy(problem.WORKERS),
        row.work,
        row.straggler,
        workers=problem.WORKERS,
        communication_seconds=travel,
    )

    @jax.jit
    def simulate(params: Any) -> tuple[Progress, Record, Any]:
        progress, records = loop.run(loop.start(params), EVENTS)
        return progress, records, loop.model(progress)

    progress, records, model = simulate(problem.tree(problem.START))
    assert row.rule is not None
    times, rule = times_of(row.straggler), row.rule()
    happened = oracle.replay(
        rule,
        lambda worker, number: times[number, worker],
        EVENTS,
        lambda messages: float(np.float32(messages[1] + messages[3]) * factor),
    )
    return Run(progress, records, problem.vector(model), rule, happened)


def run_named(name: str) -> Run:
    """The events of the row with this name."""
    (row,) = (row for row in ROWS if row.name == name)
    return run_of(row)
