"""What mixing is made from: graphs, matrices, plans, and lists of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.gossip._extras import is_graph, optimize
from jaxcomm.gossip._extras import networkx as nx
from jaxcomm.gossip._matcha_plan import MatchaPlan, laplacians_of
from jaxcomm.gossip._mixing import Rule, laplacian, mixing_matrix
from jaxcomm.gossip._mixing_plan import Active, Mixing

if TYPE_CHECKING:
    from jaxcomm.gossip._topologies import Graph


def _require_matrix(given: Any) -> np.ndarray:
    matrix = np.asarray(given, np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not np.isfinite(matrix).all():
        raise ValueError(f"A mixing matrix must be square and finite, got shape {matrix.shape}.")
    if not np.allclose(matrix.sum(axis=0), 1):
        raise ValueError(
            "The columns of a mixing matrix must add to 1, got "
            f"{matrix.sum(axis=0).round(4).tolist()}: the mean would not be kept."
        )
    return matrix


def _independent(probabilities: Sequence[float]) -> Active:
    chances = np.asarray(probabilities, np.float32)
    return lambda key, step: jax.random.uniform(key, chances.shape, jnp.float32) < chances


def to_mixing(given: Any, rule: Rule = "metropolis") -> Mixing:
    """A graph, matrix, MATCHA plan, or list of graphs or matrices to take in turns, as mixing.

    Args:
      given: One of these; a :class:`Mixing` is returned as it is.
      rule: How graphs become matrices; see :func:`mixing_matrix`.

    Returns:
      Its mixing.

    Raises:
      ValueError: If it is none of these, or columns of a matrix do not add to 1.

    Example:
      >>> from jaxcomm import gossip
      >>> mixing = gossip.to_mixing(gossip.ring(8), "uniform")
      >>> mixing.degree, len(mixing.edges), round(mixing.rho, 3), mixing.messages.tolist()
      (2, 16, 0.648, [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    """
    if isinstance(given, Mixing):
        return given
    if isinstance(given, MatchaPlan):
        if not given.matchings:
            return Mixing((np.eye(given.workers),))
        laplacians = laplacians_of(given.workers, given.matchings)
        matrices = tuple(np.eye(given.workers) - given.alpha * each for each in laplacians)
        return Mixing(matrices, given.probabilities, _independent(given.probabilities))
    if is_graph(given):
        return Mixing((mixing_matrix(given, rule),))
    if isinstance(given, list | tuple) and given and not np.isscalar(given[0][0]):
        return cyclic(given, rule)
    if isinstance(given, np.ndarray | list | tuple):
        return Mixing((_require_matrix(given),))
    raise ValueError(
        "Mixing is a networkx graph, a matrix [n, n], a `MatchaPlan`, or a list of graphs or "
        f"matrices to take in turns, got {given!r}."
    )


def _each(given: Sequence[Graph | np.ndarray], rule: Rule) -> tuple[np.ndarray, ...]:
    matrices = tuple(
        _matrix_of_part(graph, rule) if is_graph(graph) else _require_matrix(graph)
        for graph in given
    )
    if not matrices or len({len(matrix) for matrix in matrices}) > 1:
        raise ValueError(
            f"All matrices must be of as many workers, got {[len(m) for m in matrices]}."
        )
    return matrices


def _matrix_of_part(graph: Graph, rule: Rule) -> np.ndarray:
    """That of a graph of which not all workers need be connected: others talk in other steps."""
    matrix = np.eye(len(graph))
    parts = nx.weakly_connected_components if graph.is_directed() else nx.connected_components
    for part in parts(graph):
        nodes = sorted(part)
        numbered = nx.relabel_nodes(
            graph.subgraph(nodes), {node: i for i, node in enumerate(nodes)}
        )
        matrix[np.ix_(nodes, nodes)] = mixing_matrix(numbered, rule)
    return matrix


def _one_of(
    graphs: Sequence[Graph | np.ndarray],
    rule: Rule,
    which: Callable[[jax.Array, jax.Array, int], jax.Array],
) -> Mixing:
    """Mixing of which one matrix is active in a step: `which(key, step, how many)`."""
    matrices = _each(graphs, rule)
    turns = len(matrices)
    number = np.arange(turns, dtype=np.uint32)
    return Mixing(
        matrices,
        (1 / turns,) * turns,
        lambda key, step: which(key, step, turns) == number,
        exclusive=True,
    )


def cyclic(graphs: Sequence[Graph | np.ndarray], rule: Rule = "metropolis") -> Mixing:
    """One of `graphs`, or of matrices, a step, over and over.

    Args:
      graphs: networkx graphs or matrices [n, n], which need not be connected one by one.
      rule: How graphs become matrices; see :func:`mixing_matrix`.

    Returns:
      Mixing that sends what the graph of the step does.

    Raises:
      ValueError: If they are not of the same workers.

    Example:
      >>> from jaxcomm import gossip
      >>> mixing = gossip.cyclic(gossip.one_peer_exponential(8), "push")
      >>> mixing.degree, mixing.expected_rounds
      (1, 1.0)
    """
    return _one_of(graphs, rule, lambda key, step, turns: step % jnp.uint32(turns))


def randomized(graphs: Sequence[Graph | np.ndarray], rule: Rule = "metropolis") -> Mixing:
    """One of `graphs`, or of matrices, a step, drawn by all workers alike.

    Args:
      graphs: networkx graphs or matrices [n, n], which need not be connected one by one.
      rule: How graphs become matrices; with `"metropolis"`, pairs of a matching average.

    Returns:
      Mixing that sends what the graph that was drawn does.

    Raises:
      ValueError: If they are not of the same workers.

    Example:
      >>> from jaxcomm import gossip
      >>> gossip.randomized(gossip.one_peer_exponential(4, directed=False)).probabilities
      (0.5, 0.5)
    """
    return _one_of(
        graphs, rule, lambda key, step, turns: jax.random.randint(key, (), 0, turns, jnp.uint32)
    )


def random_periodic(graph: nx.Graph, budget: float) -> Mixing:
    r"""All links at once, in a part of the steps: what MATCHA is compared with.

    .. math:: W = I - b \alpha L, \quad P(b = 1) = c, \qquad
              \alpha = \arg\min_\alpha \lambda_{\max}(I - 2 c \alpha L + c \alpha^2 L^2 - J)

    Args:
      graph: A connected networkx graph of the workers 0 to n - 1.
      budget: :math:`c` in (0, 1].

    Returns:
      Mixing of one matrix, active with probability `budget`.

    Raises:
      ValueError: If `budget` is out of range or the graph directed or not connected.

    Example:
      >>> from jaxcomm import gossip
      >>> round(gossip.random_periodic(gossip.ring(8), budget=0.5).rho, 3)
      0.777
    """
    if not isinstance(budget, int | float) or not 0 < budget <= 1:
        raise ValueError(f"`budget` must be in (0, 1], got {budget!r}.")
    best_constant = mixing_matrix(graph, "best_constant")
    if len(best_constant) == 1:
        return Mixing((best_constant,))
    whole = laplacian(graph)

    def at(step: float) -> Mixing:
        matrix = np.eye(len(whole)) - step * whole
        return Mixing((matrix,), (float(budget),), _independent([budget]))

    best = optimize.minimize_scalar(
        lambda step: at(step).rho, bounds=(0, 2), method="bounded", options={"xatol": 1e-9}
    )
    return at(float(best.x))


def lazy(mixing: Any) -> Mixing:
    r"""Half as much of it: :math:`(W + I) / 2`, whose eigenvalues are not negative.

    Args:
      mixing: What :func:`to_mixing` takes.

    Returns:
      The mixing with halved weights between workers.

    Example:
      >>> from jaxcomm import gossip
      >>> gossip.lazy(gossip.path(2)).matrices[0]
      array([[0.75, 0.25],
             [0.25, 0.75]])
    """
    given = to_mixing(mixing)
    return given._replace(matrices=tuple((m + np.eye(len(m))) / 2 for m in given.matrices))
