"""Constructors of mixing: from graphs, matrices, plans and lists; whether workers agree by it."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._require import Share, require_option
from jaxcomm.gossip._extras import is_graph
from jaxcomm.gossip._extras import networkx as nx
from jaxcomm.gossip._matcha_plan import MatchaPlan, laplacians_of, least
from jaxcomm.gossip._matchings import Matching, pair_average
from jaxcomm.gossip._mixing import Active, Mixing, Rule, laplacian, mixing_matrix

if TYPE_CHECKING:
    from jaxcomm.gossip._topologies import Graph

# Above the rounding errors of eigenvalues, and below the gap of a path of 10^5 workers.
_LEAST_GAP = 1e-11


def _require_matrix(value: Any) -> np.ndarray:
    matrix = np.asarray(value, np.float64)
    if not np.allclose(matrix.sum(axis=0), 1):
        raise ValueError(f"The columns of a mixing matrix must add to 1, got {matrix.sum(axis=0)}.")
    return matrix


def _independent(probabilities: Sequence[float]) -> Active:
    chances = np.asarray(probabilities, np.float32)
    return lambda key, step: jax.random.uniform(key, chances.shape, jnp.float32) < chances


def to_mixing(graph: Any, rule: Rule = "metropolis") -> Mixing:
    """Converts a graph, matrix, MATCHA plan, or list of graphs or matrices to a mixing.

    Args:
      graph: A graph, matrix, plan or list. Of a list, each step uses one item, in a cycle. A
        :class:`Mixing` is returned unchanged.
      rule: The rule that converts a graph to a matrix; see :func:`mixing_matrix`.

    Returns:
      The mixing.

    Raises:
      ValueError: If `graph` has another type, or the columns of a matrix do not add to 1.

    Example:
      >>> from jaxcomm import gossip
      >>> mixing = gossip.to_mixing(gossip.ring(8), "uniform")
      >>> mixing.degree, len(mixing.edges), round(mixing.rho, 3), mixing.messages.tolist()
      (2, 16, 0.648, [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    """
    if isinstance(graph, Mixing):
        return graph
    if isinstance(graph, MatchaPlan):
        if not graph.matchings:
            return Mixing((np.eye(graph.workers),))
        laplacians = laplacians_of(graph.workers, graph.matchings)
        matrices = tuple(np.eye(graph.workers) - graph.alpha * each for each in laplacians)
        return Mixing(matrices, graph.probabilities, _independent(graph.probabilities))
    if is_graph(graph):
        return Mixing((mixing_matrix(graph, rule),))
    if isinstance(graph, list | tuple) and graph and not np.isscalar(graph[0][0]):
        return cyclic(graph, rule)
    if isinstance(graph, np.ndarray | list | tuple):
        return Mixing((_require_matrix(graph),))
    raise ValueError(f"A mixing must be a networkx graph, a matrix or a list, got {graph!r}.")


def _matrix_of(graph: Graph | np.ndarray, rule: Rule) -> np.ndarray:
    """The matrix of a graph that may be disconnected: other steps connect its components."""
    if not is_graph(graph):
        return _require_matrix(graph)
    matrix = np.eye(len(graph))
    parts = nx.weakly_connected_components if graph.is_directed() else nx.connected_components
    for part in parts(graph):
        nodes = sorted(part)
        numbered = nx.convert_node_labels_to_integers(graph.subgraph(part), ordering="sorted")
        matrix[np.ix_(nodes, nodes)] = mixing_matrix(numbered, rule)
    return matrix


def _one_of(
    graphs: Sequence[Graph | np.ndarray],
    rule: Rule,
    which: Callable[[jax.Array, jax.Array, int], jax.Array],
    *,
    in_turn: bool,
) -> Mixing:
    """Mixing with one active matrix per step, with the index `which(key, step, count)`."""
    count = len(graphs)
    number = np.arange(count, dtype=np.uint32)
    return Mixing(
        tuple(np.stack([_matrix_of(graph, rule) for graph in graphs])),  # Of equal shapes.
        (1 / count,) * count,
        lambda key, step: which(key, step, count) == number,
        exclusive=True,
        period=count if in_turn else 1,
    )


def cyclic(graphs: Sequence[Graph | np.ndarray], rule: Rule = "metropolis") -> Mixing:
    """Uses one graph or matrix per step, in a cycle.

    Args:
      graphs: networkx graphs or matrices [n, n]. An individual graph need not be connected.
      rule: The rule that converts a graph to a matrix; see :func:`mixing_matrix`.

    Returns:
      A :class:`Mixing`; a step sends only the messages of the current graph.

    Raises:
      ValueError: If the graphs or matrices differ in their number of workers.

    Example:
      >>> from jaxcomm import gossip
      >>> mixing = gossip.cyclic(gossip.one_peer_exponential(8), "push")
      >>> mixing.degree, mixing.expected_rounds
      (1, 1.0)
    """
    return _one_of(graphs, rule, lambda key, step, count: step % jnp.uint32(count), in_turn=True)


def randomized(graphs: Sequence[Graph | np.ndarray], rule: Rule = "metropolis") -> Mixing:
    """Draws one graph or matrix per step, the same on all workers.

    Args:
      graphs: networkx graphs or matrices [n, n]. An individual graph need not be connected.
      rule: The rule that converts a graph to a matrix; see :func:`mixing_matrix`. With
        `"metropolis"`, the two workers of a pair in a matching take their average.

    Returns:
      A :class:`Mixing`; a step sends only the messages of the drawn graph.

    Raises:
      ValueError: If the graphs or matrices differ in their number of workers.

    Example:
      >>> from jaxcomm import gossip
      >>> gossip.randomized(gossip.one_peer_exponential(4, directed=False)).probabilities
      (0.5, 0.5)
    """
    return _one_of(
        graphs,
        rule,
        lambda key, step, count: jax.random.randint(key, (), 0, count, jnp.uint32),
        in_turn=False,
    )


def random_periodic(graph: nx.Graph, budget: float) -> Mixing:
    r"""Activates all links at once in a fraction of the steps; the baseline of MATCHA.

    .. math:: W = I - b \alpha L, \quad P(b = 1) = c, \qquad
              \alpha = \arg\min_\alpha \lambda_{\max}(I - 2 c \alpha L + c \alpha^2 L^2 - J)

    Here :math:`L` is the Laplacian of `graph`, and all entries of :math:`J` are :math:`1/n`.

    Args:
      graph: A connected networkx graph of the workers 0 to n - 1.
      budget: :math:`c` in (0, 1].

    Returns:
      Mixing with one matrix, active with probability `budget`.

    Raises:
      ValueError: If `budget` is out of range, or the graph is directed or not connected.

    Example:
      >>> from jaxcomm import gossip
      >>> round(gossip.random_periodic(gossip.ring(8), budget=0.5).rho, 3)
      0.777
    """
    require_option(budget, "budget", Share)
    best_constant = mixing_matrix(graph, "best_constant")
    if len(best_constant) == 1:
        return Mixing((best_constant,))
    whole = laplacian(graph)

    def at(step: float) -> Mixing:
        matrix = np.eye(len(whole)) - step * whole
        return Mixing((matrix,), (float(budget),), _independent([budget]))

    return at(least(lambda step: at(step).rho)[0])


def lazy_mixing(mixing: Any) -> Mixing:
    r"""Halves the weights between workers: :math:`(W + I) / 2`, with nonnegative eigenvalues.

    Args:
      mixing: As for :func:`to_mixing`.

    Returns:
      The mixing with half the weight between workers.

    Example:
      >>> from jaxcomm import gossip
      >>> gossip.lazy_mixing(gossip.ring(2)).matrices[0]
      array([[0.75, 0.25],
             [0.25, 0.75]])
    """
    mixing = to_mixing(mixing)
    return mixing._replace(matrices=tuple((m + np.eye(len(m))) / 2 for m in mixing.matrices))


def one_of_pairs(workers: int, matchings: Sequence[Matching]) -> Mixing:
    """Draws one of the matchings per step; a pair takes its average."""
    return randomized([pair_average(workers, pairs) for pairs in matchings or [()]])


def _pairings(workers: int) -> list[Matching]:
    """The rounds of a tournament (the circle method): each pair is in exactly one of them."""
    places = [*range(workers), *([-1] if workers % 2 else [])]  # -1 has no partner.
    found = []
    for _ in range(len(places) - 1):
        pairs = zip(places[: len(places) // 2], reversed(places[len(places) // 2 :]), strict=True)
        found.append(tuple(pair for pair in pairs if min(pair) >= 0))
        places = [places[0], places[-1], *places[1:-1]]
    return found


def random_pairs(workers: int) -> Mixing:
    r"""Draws pairs of workers per step, the same on all workers; a pair takes its average.

    The pairs are a round of a tournament of all workers, drawn from n - 1 rounds (n, if n is odd).
    So any two workers meet with the same probability. If n is odd, one worker has no partner. A
    worker sends at most one message per step. The program has a branch per round.

    Args:
      workers: n, at least 1.

    Returns:
      A :class:`Mixing`, for any method that takes symmetric weights.

    Raises:
      ValueError: If `workers` is not a positive int.

    Example:
      >>> from jaxcomm import gossip
      >>> mixing = gossip.random_pairs(8)
      >>> len(mixing.matrices), mixing.degree
      (7, 1)
    """

    return one_of_pairs(workers, _pairings(workers))


def agreeing(graph: Any, rule: Rule = "metropolis") -> Mixing:
    r"""The mixing of a method: `to_mixing(graph, rule)`, if workers agree after enough steps of it.

    Without updates, all :math:`x_i` then converge to one value. If all weights are at least 0 and
    those of a worker for itself are not 0, they do if every worker hears every other one, directly
    or over others, in any of the steps. Otherwise, with all entries of :math:`J` being :math:`1/n`,

    .. math:: \rho(W_m \cdots W_1 - J) < 1 \text{ (in turn)}, \qquad
              \lambda_{\max}(\mathbb{E}[W^\top W] - J) < 1 \text{ (drawn)}

    Raises:
      ValueError: If they do not agree, or as `to_mixing` does.
    """
    mixing = to_mixing(graph, rule)
    together = mixing
    if mixing.constant:
        changes = sum(matrix - np.eye(mixing.workers) for matrix in mixing.matrices)
        together = Mixing((np.eye(mixing.workers) + changes,))
    used = [m for m, p in zip(together.matrices, together.probabilities, strict=True) if p > 0]
    _require_connected(np.any(np.stack(used) != 0, axis=0))
    averages = [np.min(each) >= 0 and np.min(np.diag(each)) > 0 for each in used]
    if not ((mixing.constant or mixing.exclusive) and all(averages)):
        _require_contraction(together)
    return mixing


def _require_connected(hears: np.ndarray) -> None:
    """Raises unless every worker hears every other one; `hears` is bool[receivers, senders]."""
    reached = hears | np.eye(len(hears), dtype=bool)
    for _ in range(len(hears).bit_length()):  # Over 2, 4, 8, ... links.
        reached = reached.astype(np.float32) @ reached > 0
    if not reached.all():
        worker, other = np.argwhere(~reached)[0]
        raise ValueError(f"Worker {worker} never agrees with {other}: the graph is not connected.")


def _require_contraction(mixing: Mixing) -> None:
    mean = 1 / mixing.workers
    if mixing.constant or mixing.period == len(mixing.matrices) > 1:
        product = functools.reduce(lambda before, matrix: matrix @ before, mixing.matrices)
        rest, symmetric = product - mean, np.allclose(product, product.T)
        spectrum = np.linalg.eigvalsh(rest) if symmetric else np.linalg.eigvals(rest)
        largest = float(np.max(np.abs(spectrum)))
    else:
        largest = mixing.rho
    if largest > 1 - _LEAST_GAP:
        raise ValueError(
            f"Workers never agree, by an eigenvalue of magnitude {largest:.6g}: use "
            "`gossip.lazy_mixing(mixing)` if it is negative."
        )


def draw(mixing: Any, file: str | pathlib.Path) -> None:
    """Draws the workers on a circle and their links, one color per matrix, to a PNG file.

    Args:
      mixing: As for :func:`to_mixing`, for example a graph or a plan.
      file: The path of the PNG file.

    Raises:
      ImportError: If matplotlib is missing.

    Example:
      >>> from jaxcomm import gossip
      >>> gossip.draw(gossip.ring(8), "/tmp/ring.png")
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    first = mixing[0] if isinstance(mixing, list) and mixing else mixing
    directed = is_graph(first) and first.is_directed()
    resolved = to_mixing(mixing, "push" if directed else "metropolis")
    figure = Figure(figsize=(6, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    graph = nx.empty_graph(resolved.workers, nx.DiGraph)
    places = nx.circular_layout(graph)
    nx.draw_networkx_nodes(graph, places, ax=axes, node_color="white", edgecolors="black")
    nx.draw_networkx_labels(graph, places, ax=axes, font_size=10)
    for number, matrix in enumerate(resolved.matrices):
        both_ways = np.allclose(matrix, matrix.T)
        edges = [(int(j), int(i)) for i, j in np.argwhere(matrix) if i != j]
        nx.draw_networkx_edges(
            graph,
            places,
            ax=axes,
            edgelist=[(j, i) for j, i in edges if j < i] if both_ways else edges,
            edge_color=f"C{number % 10}",
            arrowstyle="-" if both_ways else "-|>",
        )
        axes.plot([], [], color=f"C{number % 10}", label=f"{resolved.probabilities[number]:.2f}")
    rounds = f"{resolved.expected_rounds:.3g} rounds per step"
    axes.set_title(f"{resolved.workers} workers of degree {resolved.degree}, {rounds}")
    if len(resolved.matrices) > 1:
        axes.legend(title="fraction of steps", loc="upper left", frameon=False)
    axes.set_axis_off()
    figure.savefig(file, format="png", dpi=120)
