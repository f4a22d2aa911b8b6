"""Who computes on which examples: each once an epoch, and again if it was lost."""

from typing import Any

import jax
import numpy as np

from jaxcomm import _noise
from jaxcomm.synchronization._deal import Deal, new_deal, next_examples, take_examples


class Examples:
    """A deal with one hand: whoever is free takes the next examples.

    So a slow worker takes fewer of them. Examples that a worker has taken and lost come first.
    """

    def __init__(self, seed: int, examples: int) -> None:
        self._deal = new_deal(_noise.make_key(seed), examples, 1)
        self._lost: list[int] = []
        self._begin(0)

    def _begin(self, taken: int) -> None:
        """Goes to the epoch of the example with this number."""
        size = int(self._deal.examples)
        first: Deal = self._deal._replace(taken=self._deal.taken * 0)
        first = take_examples(first, np.array([taken - taken % size]))  # type: ignore[arg-type]
        self._order = np.asarray(jax.device_get(next_examples(first, size)[0]))
        self._taken = taken

    def take(self, count: int) -> np.ndarray:
        """The numbers of the next examples, int32[count]."""
        again, self._lost = self._lost[:count], self._lost[count:]
        numbers, size = list(again), len(self._order)
        while len(numbers) < count:
            place = self._taken % size
            fresh = self._order[place : place + count - len(numbers)]
            numbers.extend(fresh.tolist())
            self._taken += len(fresh)
            if self._taken % size == 0:
                self._begin(self._taken)
        return np.asarray(numbers, np.int32)

    def give_back(self, numbers: np.ndarray) -> None:
        """Deals these examples again, before any others."""
        self._lost.extend(numbers.ravel().tolist())

    def position(self, outstanding: list[np.ndarray]) -> dict[str, Any]:
        """What JSON can hold; `outstanding` are those that workers have, and that a crash loses."""
        lost = [*self._lost, *(int(x) for numbers in outstanding for x in numbers.ravel())]
        return {"taken": self._taken, "lost": lost}

    def restore(self, position: dict[str, Any]) -> None:
        """Goes on from a position."""
        self._begin(position["taken"])
        self._lost = list(position["lost"])
