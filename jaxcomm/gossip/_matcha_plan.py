"""MATCHA's plan: the activation probability of each matching, and the mixing weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxcomm._require import Share, require_option
from jaxcomm.gossip._extras import cvxpy, optimize
from jaxcomm.gossip._extras import networkx as nx
from jaxcomm.gossip._matchings import Matching, matchings_of, pair_average


class MatchaPlan(NamedTuple):
    """The plan that :func:`jaxcomm.gossip.matcha` runs.

    Attributes:
      workers: The number of workers.
      matchings: Sets of edges; each is active or inactive as a whole.
      probabilities: The probability that each matching is active in a step, independently of the
        others.
      alpha: The weight of the difference to an active neighbor.
      rho: An upper bound on the expected per-step contraction factor of the squared distance of
        workers from their mean: the largest eigenvalue of E[W'W] - J, where all entries of J are
        1/n.
      lambda_2: The second smallest eigenvalue of the expected Laplacian, its algebraic
        connectivity.
    """

    workers: int
    matchings: tuple[Matching, ...]
    probabilities: tuple[float, ...]
    alpha: float
    rho: float
    lambda_2: float

    @property
    def expected_rounds(self) -> float:
        """The expected number of active matchings per step."""
        return sum(self.probabilities)


def laplacians_of(workers: int, matchings: Sequence[Matching]) -> np.ndarray:
    """The Laplacian of each matching, [matchings, n, n]."""
    averages = [pair_average(workers, matching) for matching in matchings]
    return 2 * (np.eye(workers) - np.stack(averages))


def _most_connected(laplacians: np.ndarray, rounds: float) -> np.ndarray:
    """Probabilities, at most `rounds` in sum, that maximize lambda_2 of the mean Laplacian."""
    probabilities = cvxpy.Variable(len(laplacians))
    expected = sum(p * each for p, each in zip(probabilities, laplacians, strict=True))
    # The smallest eigenvalue is 0, so the sum of the two smallest is lambda_2.
    bounds: list[Any] = [probabilities >= 0, probabilities <= 1, sum(probabilities) <= rounds]
    problem = cvxpy.Problem(cvxpy.Maximize(cvxpy.lambda_sum_smallest(expected, 2)), bounds)
    problem.solve(solver=cvxpy.CLARABEL)
    found = np.clip(np.asarray(probabilities.value), 0, 1)
    return found * min(1, rounds / found.sum())


def least(rho: Callable[[float], float]) -> tuple[float, float]:
    """The number from 0 to 2 with the least `rho`, and that."""
    found = optimize.minimize_scalar(rho, bounds=(0, 2), method="bounded", options={"xatol": 1e-9})
    return float(found.x), float(found.fun)


def contraction(laplacians: np.ndarray, probabilities: np.ndarray, alpha: float) -> float:
    r"""The largest eigenvalue of :math:`\mathbb{E}[W^\top W] - J`.

    For :math:`W = I - \alpha \sum_j b_j L_j` with independent :math:`b_j`. Since
    :math:`L_j^2 = 2 L_j` for a matching,

    .. math:: \mathbb{E}[W^\top W] = I - 2 \alpha \bar L + \alpha^2 (\bar L^2 + 2 \tilde L), \qquad
              \bar L = \sum_j p_j L_j, \qquad \tilde L = \sum_j p_j (1 - p_j) L_j
    """
    mean = np.tensordot(probabilities, laplacians, 1)
    spread = np.tensordot(probabilities * (1 - probabilities), laplacians, 1)
    workers = len(mean)
    square = np.eye(workers) - 2 * alpha * mean + alpha**2 * (mean @ mean + 2 * spread)
    return float(np.linalg.eigvalsh(square - np.full_like(square, 1 / workers))[-1])


def matcha_plan(graph: nx.Graph | Sequence[Sequence[Sequence[int]]], budget: float) -> MatchaPlan:
    r"""Activation probabilities of the matchings that give fast consensus within a budget.

    .. math:: \max_p\; \lambda_2\Big(\sum_j p_j L_j\Big) \;\text{ with }\; \sum_j p_j \le c M, \quad
              0 \le p_j \le 1; \qquad
              \alpha = \arg\min_\alpha\; \lambda_{\max}(\mathbb{E}[W^\top W] - J)

    for :math:`M` matchings with Laplacians :math:`L_j` and a budget :math:`c`. All entries of
    :math:`J` are :math:`1/n`. The first problem is a convex program. The second is convex in one
    variable.

    Args:
      graph: A connected networkx graph of the workers 0 to n - 1, which is decomposed into
        matchings, at most one more than its largest degree; or the matchings themselves, as lists
        of edges.
      budget: The expected fraction of active matchings per step, in (0, 1].

    Returns:
      A plan, a named tuple: `workers`; `matchings`, sets of edges; `probabilities`, that each of
      them is active in a step, independently of the others; `expected_rounds`, the sum of these;
      `alpha`, the weight of the difference to an active neighbor; `rho`, an upper bound on the
      factor by which a step contracts the squared distance of workers from their mean, in
      expectation; and `lambda_2`, the algebraic connectivity of the expected graph.

    Raises:
      ValueError: If `budget` is out of range, the graph is directed or not connected, or a matching
        contains two edges of the same worker.

    Example:
      >>> from jaxcomm import gossip
      >>> plan = gossip.matcha_plan(gossip.ring(8), budget=0.5)
      >>> len(plan.matchings), round(plan.rho, 3), round(plan.expected_rounds, 3)
      (2, 0.784, 1.0)

    References:
      Wang et al., `MATCHA: Speeding Up Decentralized SGD via Matching Decomposition Sampling
      <https://arxiv.org/abs/1905.09435>`_, 2019.
    """
    require_option(budget, "budget", Share)
    workers, matchings = matchings_of(graph)
    if workers == 1:
        return MatchaPlan(1, (), (), 1.0, 0.0, 0.0)
    laplacians = laplacians_of(workers, matchings)
    rounds = budget * len(matchings)
    probabilities = np.ones(len(matchings)) if budget == 1 else _most_connected(laplacians, rounds)
    # By the trace of E[W'W] - J, no alpha of 1 or more contracts.
    alpha, rho = least(lambda alpha: contraction(laplacians, probabilities, alpha))
    expected = np.tensordot(probabilities, laplacians, 1)
    return MatchaPlan(
        workers,
        matchings,
        tuple(map(float, probabilities)),
        alpha,
        rho,
        float(np.linalg.eigvalsh(expected)[1]),
    )
