"""A picture of who talks to whom."""

import pathlib
from typing import Any

import numpy as np

from jaxcomm.gossip._extras import is_graph
from jaxcomm.gossip._extras import networkx as nx
from jaxcomm.gossip._to_mixing import to_mixing


def draw(mixing: Any, file: str | pathlib.Path) -> None:
    """Draws workers on a circle and their links, a colour for each matrix, in a PNG file.

    Args:
      mixing: What :func:`to_mixing` takes: a graph, a plan, ...
      file: Where to write.

    Raises:
      ImportError: If matplotlib is missing.

    Example:
      >>> from jaxcomm import gossip
      >>> gossip.draw(gossip.ring(8), "/tmp/ring.png")
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError("`gossip.draw` needs matplotlib: `pip install matplotlib`.") from error
    given = to_mixing(mixing, "push" if _is_directed(mixing) else "metropolis")
    figure = Figure(figsize=(6, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    graph = nx.empty_graph(given.workers, nx.DiGraph)
    places = nx.circular_layout(graph)
    nx.draw_networkx_nodes(graph, places, ax=axes, node_color="white", edgecolors="black")
    nx.draw_networkx_labels(graph, places, ax=axes, font_size=10)
    for number, matrix in enumerate(given.matrices):
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
        axes.plot([], [], color=f"C{number % 10}", label=f"{given.probabilities[number]:.2f}")
    rounds = f"{given.expected_rounds:.3g} rounds a step"
    axes.set_title(f"{given.workers} workers of degree {given.degree}, {rounds}")
    if len(given.matrices) > 1:
        axes.legend(title="part of steps", loc="upper left", frameon=False)
    axes.set_axis_off()
    figure.savefig(file, format="png", dpi=120)


def _is_directed(mixing: Any) -> bool:
    first = mixing[0] if isinstance(mixing, list) and mixing else mixing
    return is_graph(first) and first.is_directed()
