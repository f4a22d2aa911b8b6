"""Who talks to whom: graphs whose nodes are the workers 0 to n - 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from jaxcomm.gossip._extras import is_graph
from jaxcomm.gossip._extras import networkx as nx

if TYPE_CHECKING:
    Graph: TypeAlias = nx.Graph | nx.DiGraph


def require_workers(workers: int) -> None:
    """Raises unless it is a number of workers."""
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise ValueError(f"`workers` must be a Python int of at least 1, got {workers!r}.")


def require_graph(graph: Graph) -> int:
    """The number of workers of a graph that gossip can mix over.

    Raises:
      ValueError: If nodes are not 0 to n - 1, or some worker cannot be reached from another.
    """
    if not is_graph(graph) or graph.is_multigraph():
        raise ValueError(f"`graph` must be a networkx Graph or DiGraph, got {graph!r}.")
    workers = graph.number_of_nodes()
    if not workers or set(graph.nodes) != set(range(workers)):
        raise ValueError(
            "The nodes of `graph` must be the workers 0 to n - 1, got "
            f"{sorted(graph.nodes, key=str)[:8]}: use `networkx.convert_node_labels_to_integers`."
        )
    connected = nx.is_strongly_connected if graph.is_directed() else nx.is_connected
    if not connected(graph):
        parts = nx.strongly_connected_components if graph.is_directed() else nx.connected_components
        raise ValueError(
            f"`graph` is not connected: worker 0 never hears of "
            f"{sorted(set(graph) - next(part for part in parts(graph) if 0 in part))}."
        )
    return workers


def _by_number(graph: Graph) -> Graph:
    """The graph without loops, its nodes numbered in their order."""
    numbered = nx.convert_node_labels_to_integers(graph, ordering="sorted")
    numbered.remove_edges_from([*nx.selfloop_edges(numbered)])
    return numbered


def ring(workers: int) -> nx.Graph:
    """A ring of `workers`, each beside the next and the one before: degree 2.

    Args:
      workers: How many, at least 1.

    Returns:
      An undirected graph.

    Raises:
      ValueError: If `workers` is no int of at least 1.

    Example:
      >>> from jaxcomm import gossip
      >>> sorted(gossip.ring(4).edges)
      [(0, 1), (0, 3), (1, 2), (2, 3)]
    """
    require_workers(workers)
    return _by_number(nx.cycle_graph(workers))


def path(workers: int) -> nx.Graph:
    """A ring of `workers` with one edge cut.

    Args:
      workers: How many, at least 1.

    Returns:
      An undirected graph.

    Raises:
      ValueError: If `workers` is no int of at least 1.

    Example:
      >>> from jaxcomm import gossip
      >>> sorted(gossip.path(4).edges)
      [(0, 1), (1, 2), (2, 3)]
    """
    require_workers(workers)
    return nx.path_graph(workers)


def star(workers: int) -> nx.Graph:
    """The first of `workers` beside all others.

    Args:
      workers: How many, at least 1.

    Returns:
      An undirected graph.

    Raises:
      ValueError: If `workers` is no int of at least 1.

    Example:
      >>> from jaxcomm import gossip
      >>> sorted(gossip.star(4).edges)
      [(0, 1), (0, 2), (0, 3)]
    """
    require_workers(workers)
    return nx.star_graph(workers - 1)


def complete(workers: int) -> nx.Graph:
    """All `workers` beside all others: with uniform weights, the exact mean.

    Args:
      workers: How many, at least 1.

    Returns:
      An undirected graph.

    Raises:
      ValueError: If `workers` is no int of at least 1.

    Example:
      >>> from jaxcomm import gossip
      >>> sorted(gossip.complete(3).edges)
      [(0, 1), (0, 2), (1, 2)]
    """
    require_workers(workers)
    return nx.complete_graph(workers)


def torus(rows: int, columns: int) -> nx.Graph:
    """A grid of `rows` and `columns` whose borders meet: degree 4, numbered row by row.

    Args:
      rows: How many, at least 1.
      columns: How many, at least 1.

    Returns:
      An undirected graph.

    Raises:
      ValueError: If one is no int of at least 1.

    Example:
      >>> from jaxcomm import gossip
      >>> sorted(gossip.torus(3, 3).neighbors(4))
      [1, 3, 5, 7]
    """
    require_workers(rows)
    require_workers(columns)
    return _by_number(nx.grid_2d_graph(rows, columns, periodic=True))


def hypercube(workers: int) -> nx.Graph:
    """Those of `workers` whose numbers differ in one bit are neighbours: degree log2 n.

    Args:
      workers: How many, a power of 2.

    Returns:
      An undirected graph.

    Raises:
      ValueError: If `workers` is no power of 2.

    Example:
      >>> from jaxcomm import gossip
      >>> sorted(gossip.hypercube(8).neighbors(0))
      [1, 2, 4]
    """
    require_workers(workers)
    if workers & (workers - 1):
        raise ValueError(f"A hypercube has 2**k workers, got `workers`={workers}.")
    return _by_number(nx.hypercube_graph(workers.bit_length() - 1)) if workers > 1 else path(1)


def exponential(workers: int, *, directed: bool = True) -> Graph:
    """Each of n `workers`, i, to i + 1, i + 2, i + 4, ... modulo n; and back if not `directed`.

    Args:
      workers: How many, at least 1.
      directed: Whether messages go one way.

    Returns:
      A graph, directed as asked.

    Raises:
      ValueError: If `workers` is no int of at least 1.

    Example:
      >>> from jaxcomm import gossip
      >>> sorted(gossip.exponential(8).successors(0))
      [1, 2, 4]
    """
    require_workers(workers)
    graph = nx.DiGraph() if directed else nx.Graph()
    graph.add_nodes_from(range(workers))
    hops = [2**power for power in range((workers - 1).bit_length())]
    graph.add_edges_from((i, (i + hop) % workers) for i in range(workers) for hop in hops)
    return graph


def one_peer_exponential(workers: int, *, directed: bool = True) -> list[Graph]:
    """In step k, each of n `workers`, i, to i + 2**(k mod log2 n): one message a step.

    With halves kept and sent, log2 n steps are the exact mean
    where n is a power of 2. Not `directed`, worker i and the one whose number differs in bit k
    are a pair.

    Args:
      workers: How many, at least 1.
      directed: Whether messages go one way.

    Returns:
      The graphs, one a step, to be taken in turns.

    Raises:
      ValueError: If `workers` is no int of at least 1, or no power of 2 where it is not `directed`.

    Example:
      >>> from jaxcomm import gossip
      >>> [sorted(graph.successors(0)) for graph in gossip.one_peer_exponential(8)]
      [[1], [2], [4]]
    """
    require_workers(workers)
    if not directed and workers & (workers - 1):
        raise ValueError(
            f"Pairs whose numbers differ in one bit need 2**k workers, got `workers`={workers}."
        )
    graphs: list[Graph] = []
    for power in range(max((workers - 1).bit_length(), 1)):
        graph = nx.DiGraph() if directed else nx.Graph()
        graph.add_nodes_from(range(workers))
        hop = 2**power
        to = lambda i, hop=hop: (i + hop) % workers if directed else i ^ hop  # noqa: E731
        graph.add_edges_from((i, to(i)) for i in range(workers) if workers > 1)
        graphs.append(graph)
    return graphs


def erdos_renyi(workers: int, probability: float, *, seed: int = 0) -> nx.Graph:
    """Each pair of `workers` beside each other with `probability`; drawn by `seed` until connected.

    Args:
      workers: How many, at least 1.
      probability: Of each edge, in [0, 1].
      seed: Of the draws.

    Returns:
      An undirected graph.

    Raises:
      ValueError: If `workers` is no int of at least 1, or none of a hundred draws was connected.

    Example:
      >>> from jaxcomm import gossip
      >>> len(gossip.erdos_renyi(8, 0.4).edges) >= 7
      True
    """
    require_workers(workers)
    return _connected(
        lambda draw: nx.gnp_random_graph(workers, probability, seed=draw), seed, "`probability`"
    )


def random_geometric(workers: int, radius: float, *, seed: int = 0) -> nx.Graph:
    """`workers` in the unit square, neighbours within `radius`; drawn by `seed` until connected.

    Args:
      workers: How many, at least 1.
      radius: Of the side of the square.
      seed: Of the draws.

    Returns:
      An undirected graph.

    Raises:
      ValueError: If `workers` is no int of at least 1, or none of a hundred draws was connected.

    Example:
      >>> from jaxcomm import gossip
      >>> len(gossip.random_geometric(8, 0.5).edges) >= 7
      True
    """
    require_workers(workers)
    return _connected(
        lambda draw: nx.random_geometric_graph(workers, radius, seed=draw), seed, "`radius`"
    )


def _connected(draw: Callable[[int], nx.Graph], seed: int, option: str) -> nx.Graph:
    for attempt in range(100):
        graph = draw(100 * seed + attempt)
        if nx.is_connected(graph):
            return graph
    raise ValueError(f"No graph of a hundred was connected: give a larger {option}.")
