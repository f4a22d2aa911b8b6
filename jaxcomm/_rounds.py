"""An all-to-all as rounds in which each sends to one other, and no two send to each other.

Gloo, by which JAX moves arrays between processes on CPUs, holds a connection as long as it writes
to it: of what two workers send each other at once, one waits for the other, and a link that could
carry both takes twice as long.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels._dispatch import target

LARGE_ROW = 2**17  # Bytes.


class Rounds(NamedTuple):
    """Who sends what to whom.

    Attributes:
      parts: Of how many parts each row is sent; a round moves one of them.
      targets: To whom each worker sends, int[rounds, workers].
      numbers: Which part of that worker's row, int[rounds, workers].
    """

    parts: int
    targets: np.ndarray
    numbers: np.ndarray

    @property
    def pairs(self) -> list[list[tuple[int, int]]]:
        """(sender, receiver) of each round."""
        return [[*enumerate(map(int, targets))] for targets in self.targets]

    @property
    def places(self) -> np.ndarray:
        """Where a worker has each part that is its own, int[workers, senders, parts].

        In the list of the parts that it keeps, followed by those it has received by round.
        """
        rounds, workers = self.targets.shape
        found = np.tile(np.arange(self.parts), (workers, workers, 1))
        for number in range(rounds):
            for sender, receiver in enumerate(self.targets[number]):
                found[receiver, sender, self.numbers[number, sender]] = self.parts + number
        return found


def _cycles(workers: int) -> np.ndarray:
    """For an even number: n - 1 circles of all workers, in which any two are neighbours twice.

    One zigzags through the numbers below m = n - 1, 0, 1, -1, 2, -2, ..., and returns by the
    worker m; neighbours are 1, 2, ..., m - 1 apart, so that turning it by 0 to m - 1 has each
    distance between all.
    """
    m = workers - 1
    zigzag = [(k + 1) // 2 if k % 2 else -(k // 2) for k in range(m)]
    return np.array([[m, *((step + turn) % m for step in zigzag)] for turn in range(m)])


def rounds(workers: int) -> Rounds | None:
    """The rounds of so many workers, or None of two, who can but send to each other.

    Of an odd number, worker i sends to i + d in round d. Of an even one, i + n/2 would answer;
    there each sends half a row along each of 2 (n - 1) circles.
    """
    if workers <= 2:
        return None
    if workers % 2:
        targets = (np.arange(workers) + np.arange(1, workers)[:, None]) % workers
        return Rounds(1, targets, np.zeros_like(targets))
    circles = _cycles(workers)
    targets = np.empty((2 * len(circles), workers), int)
    for number, circle in enumerate([*circles, *circles[:, ::-1]]):
        targets[number, circle] = np.roll(circle, -1)
    seen = np.zeros((workers, workers), int)
    numbers = np.empty_like(targets)
    for number, row in enumerate(targets):
        numbers[number] = seen[np.arange(workers), row]
        seen[np.arange(workers), row] += 1
    return Rounds(2, targets, numbers)


def by_gloo() -> bool:
    """Whether arrays move between processes on CPUs by Gloo, JAX's default there."""
    implementation = jax.config.jax_cpu_collectives_implementation
    return jax.process_count() > 1 and target().platform == "cpu" and implementation == "gloo"


def worth(rows: jax.Array) -> Rounds | None:
    """The rounds for `[workers, ...]`, or None where one all-to-all is as good.

    A row that sockets take at once does not hold up anybody.
    """
    schedule = rounds(len(rows)) if by_gloo() else None
    size = rows.size // len(rows)
    large = size * rows.dtype.itemsize >= LARGE_ROW
    return schedule if schedule and large and size % schedule.parts == 0 else None


def exchange(schedule: Rounds, rows: jax.Array, axis_names: tuple[str, ...]) -> jax.Array:
    """Row i of `[workers, ...]` goes to worker i; what all have sent, in their order."""
    workers, me = len(rows), lax.axis_index(axis_names)
    split = rows.reshape(workers, schedule.parts, -1)
    targets, numbers = jnp.asarray(schedule.targets), jnp.asarray(schedule.numbers)
    received = [
        lax.ppermute(split[targets[number, me], numbers[number, me]], axis_names, pairs)
        for number, pairs in enumerate(schedule.pairs)
    ]
    here = jnp.concatenate([split[me], jnp.stack(received)])
    return here[jnp.asarray(schedule.places)[me]].reshape(rows.shape)


def all_to_all(rows: jax.Array, axis_names: tuple[str, ...]) -> jax.Array:
    """Row i of `[workers, ...]` goes to worker i, in rounds where these are worth it."""
    schedule = worth(rows)
    if schedule is None:
        return lax.all_to_all(rows, axis_names, 0, 0)
    return exchange(schedule, rows, axis_names)
