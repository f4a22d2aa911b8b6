"""Drawing of mixing graphs."""

import pathlib
from typing import Any

import numpy as np

from jaxcomm.gossip._extras import is_graph
from jaxcomm.gossip._extras import networkx as nx
from jaxcomm.gossip._to_mixing import to_mixing


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
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError("`gossip.draw` needs matplotlib: `pip install matplotlib`.") from error
    resolved = to_mixing(mixing, "push" if _is_directed(mixing) else "metropolis")
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


def _is_directed(mixing: Any) -> bool:
    first = mixing[0] if isinstance(mixing, list) and mixing else mixing
    return is_graph(first) and first.is_directed()
