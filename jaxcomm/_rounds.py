"""An all-to-all in rounds: each worker sends to one other, and no two workers send to each other.

JAX moves arrays between processes on CPUs with Gloo, which holds a connection while it writes to
it. If two workers send to each other at once, one message waits for the other, and a full-duplex
link takes twice as long.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels._dispatch import target

LARGE_ROW = 2**17  # Bytes.


class Rounds(NamedTuple):
    """The schedule of an all-to-all.

    Attributes:
      parts: The number of parts of each row; a round moves one part.
      targets: The receiver of each worker's message, int[rounds, workers].
      numbers: The index of the part of the receiver's row that is sent, int[rounds, workers].
    """

    parts: int
    targets: np.ndarray
    numbers: np.ndarray

    @property
    def pairs(self) -> list[list[tuple[int, int]]]:
        """The pairs (sender, receiver) of each round."""
        return [[*enumerate(map(int, targets))] for targets in self.targets]

    @property
    def places(self) -> np.ndarray:
        """The position of each part of a worker's result, int[workers, senders, parts].

        Positions index the list of the parts that the worker keeps, followed by the parts that it
        receives, in the order of rounds.
        """
        rounds, workers = self.targets.shape
        found = np.tile(np.arange(self.parts), (workers, workers, 1))
        for number in range(rounds):
            for sender, receiver in enumerate(self.targets[number]):
                found[receiver, sender, self.numbers[number, sender]] = self.parts + number
        return found


def _cycles(workers: int) -> np.ndarray:
    """n - 1 cycles through all workers for an even n; any two workers are neighbors in two cycles.

    The first cycle zigzags through the numbers below m = n - 1 (0, 1, -1, 2, -2, ...) and closes
    through worker m. Its neighbors differ by 1, 2, ..., m - 1 modulo m. The rotations by 0 to
    m - 1 therefore contain each difference between all workers.
    """
    m = workers - 1
    zigzag = [(k + 1) // 2 if k % 2 else -(k // 2) for k in range(m)]
    return np.array([[m, *((step + turn) % m for step in zigzag)] for turn in range(m)])


def rounds(workers: int) -> Rounds | None:
    """The rounds for n workers; `None` for two, who can only send to each other.

    For an odd n, worker i sends to worker i + d in round d. For an even n, workers i and i + n/2
    would send to each other; instead, each worker sends half a row along each of 2 (n - 1) cycles.
    """
    if workers <= 2:
        return None
    if workers % 2:
        targets = (np.arange(workers) + np.arange(1, workers)[:, None]) % workers
        return Rounds(1, targets, np.zeros_like(targets))
    cycles = _cycles(workers)
    targets = np.empty((2 * len(cycles), workers), int)
    for number, cycle in enumerate([*cycles, *cycles[:, ::-1]]):
        targets[number, cycle] = np.roll(cycle, -1)
    sent = np.zeros((workers, workers), int)
    numbers = np.empty_like(targets)
    for number, row in enumerate(targets):
        numbers[number] = sent[np.arange(workers), row]
        sent[np.arange(workers), row] += 1
    return Rounds(2, targets, numbers)


def by_gloo() -> bool:
    """Whether JAX moves arrays between processes on CPUs with Gloo, its default there."""
    implementation = jax.config.jax_cpu_collectives_implementation
    return jax.process_count() > 1 and target().platform == "cpu" and implementation == "gloo"


def worth(rows: jax.Array) -> Rounds | None:
    """The rounds for `[workers, ...]`, or `None` if one all-to-all is as fast.

    A row that fits into the socket buffers does not block other messages.
    """
    schedule = rounds(len(rows)) if by_gloo() else None
    size = rows.size // len(rows)
    large = size * rows.dtype.itemsize >= LARGE_ROW
    return schedule if schedule and large and size % schedule.parts == 0 else None


def exchange(schedule: Rounds, rows: jax.Array, axis_names: tuple[str, ...]) -> jax.Array:
    """Sends row i of `[workers, ...]` to worker i; returns the received rows, in worker order."""
    workers, me = len(rows), lax.axis_index(axis_names)
    split = rows.reshape(workers, schedule.parts, -1)
    targets, numbers = jnp.asarray(schedule.targets), jnp.asarray(schedule.numbers)
    received = [
        lax.ppermute(split[targets[number, me], numbers[number, me]], axis_names, pairs)
        for number, pairs in enumerate(schedule.pairs)
    ]
    parts = jnp.concatenate([split[me], jnp.stack(received)])
    return parts[jnp.asarray(schedule.places)[me]].reshape(rows.shape)


def all_to_all(rows: jax.Array, axis_names: tuple[str, ...]) -> jax.Array:
    """Sends row i of `[workers, ...]` to worker i, in rounds if that is faster."""
    schedule = worth(rows)
    if schedule is None:
        return lax.all_to_all(rows, axis_names, 0, 0)
    return exchange(schedule, rows, axis_names)
