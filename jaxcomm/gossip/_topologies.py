"""Topologies that networkx lacks: graphs whose nodes are the workers 0 to n - 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from jaxcomm.gossip._extras import networkx as nx

if TYPE_CHECKING:
    Graph: TypeAlias = nx.Graph | nx.DiGraph


def require_graph(graph: Graph) -> int:
    """Checks a graph for gossip and returns its number of workers.

    Raises:
      ValueError: If the nodes are not 0 to n - 1, or the graph is not (strongly) connected.
    """
    workers = graph.number_of_nodes()
    if set(graph.nodes) != set(range(workers)):
        raise ValueError("`graph` must have the workers 0 to n - 1 as nodes: relabel them.")
    if not (nx.is_strongly_connected if graph.is_directed() else nx.is_connected)(graph):
        raise ValueError("`graph` is not connected: some workers never hear some others.")
    return workers


def _relabeled(graph: Graph) -> Graph:
    """The graph without self-loops, with its nodes relabeled 0 to n - 1 in sorted order."""
    numbered = nx.convert_node_labels_to_integers(graph, ordering="sorted")
    numbered.remove_edges_from([*nx.selfloop_edges(numbered)])
    return numbered


def ring(workers: int) -> nx.Graph:
    """A ring of `workers`: each has the next and the previous one as neighbors, degree 2.

    Args:
      workers: The number of workers, at least 1.

    Returns:
      An undirected graph.

    Example:
      >>> from jaxcomm import gossip
      >>> sorted(gossip.ring(4).edges)
      [(0, 1), (0, 3), (1, 2), (2, 3)]
    """
    return _relabeled(nx.cycle_graph(workers))


def torus(rows: int, columns: int) -> nx.Graph:
    """A grid of `rows` and `columns` with wrapped borders: degree 4, numbered row by row.

    Args:
      rows: The number of rows, at least 1.
      columns: The number of columns, at least 1.

    Returns:
      An undirected graph.

    Example:
      >>> from jaxcomm import gossip
      >>> sorted(gossip.torus(3, 3).neighbors(4))
      [1, 3, 5, 7]
    """
    return _relabeled(nx.grid_2d_graph(rows, columns, periodic=True))


def hypercube(workers: int) -> nx.Graph:
    """A hypercube: workers are neighbors if their indices differ in one bit; the degree is log2 n.

    Args:
      workers: The number of workers, a power of 2.

    Returns:
      An undirected graph.

    Raises:
      ValueError: If `workers` is not a power of 2.

    Example:
      >>> from jaxcomm import gossip
      >>> sorted(gossip.hypercube(8).neighbors(0))
      [1, 2, 4]
    """
    if workers & (workers - 1):
        raise ValueError(f"A hypercube has 2**k workers, got `workers`={workers}.")
    return _relabeled(nx.hypercube_graph(workers.bit_length() - 1)) if workers > 1 else ring(1)


def exponential(workers: int, *, directed: bool = True) -> Graph:
    """Edges from each worker i of n `workers` to i + 1, i + 2, i + 4, ... modulo n.

    Args:
      workers: The number of workers, at least 1.
      directed: Whether edges have a direction; otherwise messages go both ways.

    Returns:
      A graph, directed or not.

    Example:
      >>> from jaxcomm import gossip
      >>> sorted(gossip.exponential(8).successors(0))
      [1, 2, 4]
    """
    graph = nx.empty_graph(workers, nx.DiGraph if directed else nx.Graph)
    hops = [2**power for power in range((workers - 1).bit_length())]
    graph.add_edges_from((i, (i + hop) % workers) for i in range(workers) for hop in hops)
    return graph


def one_peer_exponential(workers: int, *, directed: bool = True) -> list[Graph]:
    """Graphs in which worker i sends to i + 2**(k mod log2 n) in step k: one message per step.

    If each worker keeps one half and sends the other, and n is a power of 2, log2 n steps give the
    exact mean. If not `directed`, workers whose indices differ only in bit k exchange messages in
    step k.

    Args:
      workers: The number of workers, at least 1.
      directed: Whether edges have a direction; otherwise pairs exchange messages.

    Returns:
      The graphs, one per step, for :func:`cyclic`.

    Raises:
      ValueError: If `workers` is not an int of at least 1, or not a power of 2 with
        `directed=False`.

    Example:
      >>> from jaxcomm import gossip
      >>> [sorted(graph.successors(0)) for graph in gossip.one_peer_exponential(8)]
      [[1], [2], [4]]
    """
    if not directed and workers & (workers - 1):
        raise ValueError(f"`directed=False` needs 2**k workers, got `workers`={workers}.")
    graphs: list[Graph] = []
    for power in range(max((workers - 1).bit_length(), 1)):
        graph = nx.empty_graph(workers, nx.DiGraph if directed else nx.Graph)
        hop = 2**power
        receivers = [(i + hop) % workers if directed else i ^ hop for i in range(workers)]
        graph.add_edges_from(enumerate(receivers) if workers > 1 else [])
        graphs.append(graph)
    return graphs
