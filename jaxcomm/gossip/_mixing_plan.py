"""Mixing as it goes on over steps: which matrices, when, and what that costs."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, cast

import jax
import numpy as np

from jaxcomm._base import PyTree
from jaxcomm.gossip._rounds import to_rounds

Active: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]
"""`(public key[], step uint32[]) -> bool[matrices]`, equal on all workers."""


class Mixing(NamedTuple):
    r"""Who takes in how much from whom, and when.

    In a step, with :math:`b_k` that all workers know,

    .. math:: W = I + \sum_k b_k (W_k - I), \qquad
              x_i \gets x_i + \sum_j W_{ij} (x_j - x_i) .

    A matrix that is not active sends nothing.

    Attributes:
      matrices: :math:`W_k`, float64[n, n], rows of receivers and columns of senders.
      probabilities: Of each to be active in a step.
      active: Draws or counts which are; `None` where all are, always.
      exclusive: Whether just one is active in a step; else each is by itself.
    """

    matrices: tuple[np.ndarray, ...]
    probabilities: tuple[float, ...] = (1.0,)
    active: Active | None = None
    exclusive: bool = False

    @property
    def workers(self) -> int:
        """How many."""
        return len(self.matrices[0])

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs (sender, receiver) that ever talk."""
        used = sum((np.abs(matrix) for matrix in self.matrices), np.zeros(()))
        return tuple((int(j), int(i)) for i, j in np.argwhere(used) if i != j)

    @property
    def symmetric(self) -> bool:
        """Whether what is taken in one way is taken in the other way too."""
        return all(np.allclose(matrix, matrix.T) for matrix in self.matrices)

    @property
    def constant(self) -> bool:
        """Whether all steps mix alike."""
        return self.active is None

    @property
    def messages(self) -> np.ndarray:
        """What each worker sends in a step, on average, in messages; float64[n]."""
        sent = [np.count_nonzero(_off_diagonal(matrix), axis=0) for matrix in self.matrices]
        return cast(np.ndarray, np.asarray(self.probabilities) @ np.stack(sent))

    @property
    def degree(self) -> int:
        """The most messages that a worker sends in a step."""
        sent = [np.count_nonzero(_off_diagonal(matrix), axis=0) for matrix in self.matrices]
        together = np.max(sent, axis=0) if self.exclusive else np.sum(sent, axis=0)
        return int(together.max())

    @property
    def expected_rounds(self) -> float:
        """Messages one after the other in a step, on average: its time, in units of one message."""
        rounds = [len(to_rounds(matrix)) for matrix in self.matrices]
        return float(np.dot(self.probabilities, rounds))

    @property
    def rho(self) -> float:
        r"""Of the squared distance from the mean, what is expected to be left after a step.

        The largest eigenvalue of :math:`\mathbb{E}[W^\top W] - J`, an average over steps.
        """
        identity = np.eye(self.workers)
        if not all(np.allclose(matrix.sum(axis=1), 1) for matrix in self.matrices):
            raise ValueError("Rows of push-sum weights do not add to 1: no one rate is known.")
        changes = [matrix - identity for matrix in self.matrices]
        if self.exclusive:
            square = _weighted(self.probabilities, [m.T @ m for m in self.matrices])
        else:
            mean = identity + _weighted(self.probabilities, changes)
            spread = [p * (1 - p) for p in self.probabilities]
            square = mean.T @ mean + _weighted(spread, [change.T @ change for change in changes])
        return float(np.linalg.eigvalsh(square - 1 / self.workers)[-1])

    @property
    def gap(self) -> float:
        """The spectral gap: 1 less the square root of `rho`."""
        return 1 - float(np.sqrt(max(self.rho, 0)))

    def bytes_per_step(self, params: PyTree) -> float:
        """Bytes that the busiest worker sends in a step, on average, of parameters as they are."""
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
        return float(self.messages.max() * size)


def _off_diagonal(matrix: np.ndarray) -> np.ndarray:
    return matrix - np.diag(np.diag(matrix))


def _weighted(weights: Sequence[float], matrices: list[np.ndarray]) -> np.ndarray:
    return cast(np.ndarray, np.tensordot(np.asarray(weights), np.stack(matrices), 1))
