"""Graphs of the experiments of MATCHA's paper, with values that were computed for them."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import networkx as nx


class Base(NamedTuple):
    """A graph, its matchings, and what must come out."""

    name: str
    matchings: list[list[list[int]]]
    alpha: float
    rho: float
    matcha: dict[str, Any]  # by the budget

    @property
    def graph(self) -> nx.Graph:
        return nx.Graph(tuple(edge) for matching in self.matchings for edge in matching)

    def __repr__(self) -> str:
        return self.name


GRAPHS = [
    Base(
        each["name"],
        each["matchings"],
        each["dpsgd"]["alpha"],
        each["dpsgd"]["rho"],
        each["matcha"],
    )
    for each in json.loads(Path(__file__).with_name("matcha_graphs.json").read_text())["graphs"]
]
