"""Mixing: matrices of the weights of gossip averages, when each is active, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, cast

import jax
import numpy as np

from jaxcomm._contract import PyTree
from jaxcomm.gossip._extras import networkx as nx
from jaxcomm.gossip._matchings import to_rounds
from jaxcomm.gossip._topologies import require_graph

if TYPE_CHECKING:
    from jaxcomm.gossip._topologies import Graph

Rule = Literal["metropolis", "uniform", "max_degree", "best_constant", "push"]


def laplacian(graph: nx.Graph) -> np.ndarray:
    """Degrees on the diagonal, -1 at edges; float64[n, n]."""
    return nx.laplacian_matrix(graph, nodelist=range(len(graph)), weight=None).toarray() * 1.0


def _metropolis(graph: nx.Graph) -> np.ndarray:
    weights = np.zeros((len(graph), len(graph)))
    for i, j in graph.edges:
        weights[i, j] = weights[j, i] = 1 / (1 + max(graph.degree[i], graph.degree[j]))
    return weights + np.diag(1 - weights.sum(axis=1))


def _uniform(graph: nx.Graph) -> np.ndarray:
    degrees = {degree for _, degree in graph.degree}
    if len(degrees) > 1:
        raise ValueError(f"`rule`='uniform' needs equal degrees, got {degrees}: use 'metropolis'.")
    return _max_degree(graph)


def _constant(graph: nx.Graph, step: float) -> np.ndarray:
    return np.eye(len(graph)) - step * laplacian(graph)


def _max_degree(graph: nx.Graph) -> np.ndarray:
    return _constant(graph, 1 / (1 + max(degree for _, degree in graph.degree)))


def _best_constant(graph: nx.Graph) -> np.ndarray:
    """The equal edge weight that contracts fastest: 2 / (lambda_2 + lambda_n) of the Laplacian."""
    if len(graph) == 1:
        return np.eye(1)
    eigenvalues = np.linalg.eigvalsh(laplacian(graph))
    return _constant(graph, float(2 / (eigenvalues[1] + eigenvalues[-1])))


def _push(graph: Graph) -> np.ndarray:
    weights = np.eye(len(graph))
    for sender, receiver in graph.to_directed().edges:
        weights[receiver, sender] = 1
    return weights / weights.sum(axis=0)


_RULES: dict[Rule, Callable[[nx.Graph], np.ndarray]] = {
    "metropolis": _metropolis,
    "uniform": _uniform,
    "max_degree": _max_degree,
    "best_constant": _best_constant,
    "push": _push,
}


def mixing_matrix(graph: Graph, rule: Rule = "metropolis") -> np.ndarray:
    r"""The mixing matrix :math:`W` of the average :math:`x_i \gets \sum_j W_{ij} x_j`.

    With degrees :math:`d_i` and the Laplacian :math:`L`:

    =================  =====================================================================
    `"metropolis"`     :math:`W_{ij} = 1 / (1 + \max(d_i, d_j))`
    `"uniform"`        :math:`1 / (1 + d)`, if all degrees are :math:`d`
    `"max_degree"`     :math:`I - L / (1 + \max_i d_i)`
    `"best_constant"`  :math:`I - 2 / (\lambda_2 + \lambda_n) L`, with eigenvalues of :math:`L`
    `"push"`           a worker and its receivers get equal shares: columns add to 1
    =================  =====================================================================

    All but the last are symmetric and doubly stochastic, and need an undirected graph.

    Args:
      graph: A networkx graph of the workers 0 to n - 1.
      rule: One of the rules in this table.

    Returns:
      float64[n, n].

    Raises:
      ValueError: If the graph is not connected, its nodes are not 0 to n - 1, or the rule does not
        accept it.

    Example:
      >>> from jaxcomm import gossip
      >>> gossip.mixing_matrix(gossip.ring(4))[0].round(2)
      array([0.33, 0.33, 0.  , 0.33])

    References:
      Xiao, Boyd, `Fast linear iterations for distributed averaging
      <https://doi.org/10.1016/j.sysconle.2004.02.022>`_, 2004.
    """
    require_graph(graph)
    if graph.is_directed() and rule != "push":
        raise ValueError(f"`graph` is directed, and `rule`={rule!r} is not: use `gossip.sgp`.")
    return _RULES[rule](graph)


Active: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]
"""`(shared key[], step uint32[]) -> bool[matrices]`, equal on all workers."""


class Mixing(NamedTuple):
    r"""The weights of gossip averages, and when each matrix is active.

    In a step, with :math:`b_k` equal on all workers,

    .. math:: W = I + \sum_k b_k (W_k - I), \qquad
              x_i \gets x_i + \sum_j W_{ij} (x_j - x_i) .

    An inactive matrix sends nothing.

    Attributes:
      matrices: :math:`W_k`, float64[n, n], with one row per receiver and one column per sender.
      probabilities: The probability that each matrix is active in a step.
      active: A function `(key[], step uint32[]) -> bool[matrices]` that returns which matrices are
        active, equal on all workers; `None` if all are always active.
      exclusive: Whether at most one matrix is active per step: exactly one if the probabilities
        add to 1. Otherwise, each is active independently of the others.
      period: The number of steps after which `active` repeats, if it depends on the step; 1 if
        matrices are drawn, or always active.
    """

    matrices: tuple[np.ndarray, ...]
    probabilities: tuple[float, ...] = (1.0,)
    active: Active | None = None
    exclusive: bool = False
    period: int = 1

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.matrices[0])

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs (sender, receiver) that are linked in any matrix."""
        used = sum((np.abs(matrix) for matrix in self.matrices), np.zeros(()))
        return tuple((int(j), int(i)) for i, j in np.argwhere(used) if i != j)

    @property
    def symmetric(self) -> bool:
        """Whether all matrices are symmetric."""
        return all(np.allclose(matrix, matrix.T) for matrix in self.matrices)

    @property
    def constant(self) -> bool:
        """Whether all steps use the same mixing matrix."""
        return self.active is None

    @property
    def pauses(self) -> bool:
        """Whether no matrix is active in some steps, if at most one is."""
        return sum(self.probabilities) < 1 - 1e-6

    @property
    def messages(self) -> np.ndarray:
        """The expected number of messages that each worker sends per step; float64[n]."""
        return cast(np.ndarray, np.asarray(self.probabilities) @ self._sent)

    @property
    def degree(self) -> int:
        """The largest number of messages that a worker sends in one step."""
        return int((self._sent.max(axis=0) if self.exclusive else self._sent.sum(axis=0)).max())

    @property
    def _sent(self) -> np.ndarray:
        """The messages of each worker, int[matrices, n]."""
        return np.stack([np.count_nonzero(off_diagonal(m), axis=0) for m in self.matrices])

    @property
    def expected_rounds(self) -> float:
        """The expected number of sequential messages per step.

        The communication time of a step is this number times the time of one message.
        """
        rounds = [len(to_rounds(matrix)) for matrix in self.matrices]
        return float(np.dot(self.probabilities, rounds))

    @property
    def rho(self) -> float:
        r"""The expected per-step contraction factor of the squared distance from the mean.

        The largest eigenvalue of :math:`\mathbb{E}[W^\top W] - J`, averaged over steps. All entries
        of :math:`J` are :math:`1/n`.
        """
        identity = np.eye(self.workers)
        if not all(np.allclose(matrix.sum(axis=1), 1) for matrix in self.matrices):
            raise ValueError("`rho` is not defined for push-sum weights: rows do not add to 1.")
        changes = [matrix - identity for matrix in self.matrices]
        if self.exclusive:
            square = np.tensordot(self.probabilities, [m.T @ m for m in self.matrices], 1)
        else:
            mean = identity + np.tensordot(self.probabilities, changes, 1)
            spread = [p * (1 - p) for p in self.probabilities]
            square = mean.T @ mean + np.tensordot(spread, [m.T @ m for m in changes], 1)
        return float(np.linalg.eigvalsh(square - 1 / self.workers)[-1])

    @property
    def gap(self) -> float:
        """The spectral gap, 1 - sqrt(`rho`)."""
        return 1 - float(np.sqrt(max(self.rho, 0)))

    def bytes_per_step(self, params: PyTree) -> float:
        """Expected bytes per step that the busiest worker sends, for uncompressed parameters."""
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
        return float(self.messages.max() * size)


def off_diagonal(matrix: np.ndarray) -> np.ndarray:
    """The matrix with zeros on its diagonal."""
    return matrix - np.diag(np.diag(matrix))
