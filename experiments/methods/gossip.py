"""The graphs and the methods of the comparison of gossip."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import networkx as nx
import optax

from jaxcomm import compression, gossip

BUDGET = 0.5
BASELINE, CLAIMED = "dpsgd", "matcha"

# Connected graphs as matchings. The first and the last are from figures 1a and 3b of the paper.
GRAPHS: dict[str, Sequence[Sequence[tuple[int, int]]]] = {
    "erdos_renyi_8": [
        [(1, 5), (6, 7), (0, 4), (2, 3)],
        [(1, 7), (3, 6)],
        [(1, 0), (3, 7), (5, 6)],
        [(1, 2), (7, 0)],
        [(3, 1)],
    ],
    "ring_8": [
        [(0, 1), (2, 3), (4, 5), (6, 7)],
        [(0, 7), (2, 1), (4, 3), (6, 5)],
    ],
    "erdos_renyi_16": [
        [(2, 7), (3, 15), (13, 14), (8, 9), (1, 5), (0, 10), (6, 12), (4, 11)],
        [(12, 11), (5, 6), (14, 1), (9, 10), (15, 2), (8, 13)],
        [(12, 5), (11, 6), (1, 8), (9, 3), (2, 10)],
        [(12, 14), (11, 9), (5, 15), (0, 6), (1, 7)],
        [(12, 8), (5, 2), (11, 14), (1, 6)],
        [(12, 15), (13, 11), (10, 5), (3, 14)],
        [(12, 9)],
        [(0, 12)],
    ],
}


class Topology(NamedTuple):
    """A graph and its matchings."""

    graph: nx.Graph
    matchings: Sequence[Sequence[tuple[int, int]]]


def make_topology(name: str) -> Topology:
    """The graph of that name and its matchings."""
    return Topology(nx.Graph(edge for each in GRAPHS[name] for edge in each), GRAPHS[name])


class GossipMethod(NamedTuple):
    """A gossip method, which builds a transformation."""

    build: Callable[[Topology, int], optax.GradientTransformation]  # from the graph and a seed
    sends: str
    on_every_graph: bool = False  # Otherwise compared only on the first graph.


def _top_10_percent() -> Any:
    return compression.sparsifiers.top_k(ratio=0.1)


def _four_bits() -> Any:
    return compression.blockwise(compression.quantizers.dither(levels=7), block_size=32)


METHODS: dict[str, GossipMethod] = {
    BASELINE: GossipMethod(
        lambda topology, seed: gossip.dpsgd(
            gossip.to_mixing(topology.graph, "best_constant"),
            order="adapt_then_combine",
            diagnostics=True,
        ),
        "parameters over every link in every step",
        on_every_graph=True,
    ),
    CLAIMED: GossipMethod(
        lambda topology, seed: gossip.matcha(
            gossip.matcha_plan(topology.matchings, BUDGET), seed=seed, diagnostics=True
        ),
        "parameters over a random half of the matchings per step",
        on_every_graph=True,
    ),
    "periodic": GossipMethod(
        lambda topology, seed: gossip.dpsgd(
            gossip.random_periodic(topology.graph, BUDGET),
            order="adapt_then_combine",
            seed=seed,
            diagnostics=True,
        ),
        "parameters over every link in a random half of the steps",
        on_every_graph=True,
    ),
    "choco_sgd": GossipMethod(
        lambda topology, seed: gossip.choco_sgd(
            topology.graph, _top_10_percent(), step_size=0.3, seed=seed, diagnostics=True
        ),
        "the largest 10 % of the differences to the copies of the parameters at neighbors",
    ),
    "choco_sgd_over_matcha": GossipMethod(
        lambda topology, seed: gossip.choco_sgd(
            gossip.matcha_plan(topology.matchings, BUDGET),
            _top_10_percent(),
            step_size=0.3,
            seed=seed,
            diagnostics=True,
        ),
        "the same over half the matchings, with copies per neighbor",
    ),
    "deep_squeeze": GossipMethod(
        lambda topology, seed: gossip.deep_squeeze(
            topology.graph, _four_bits(), step_size=0.5, seed=seed, diagnostics=True
        ),
        "parameters in 4 bits, in blocks of 32, with feedback",
    ),
    "d2": GossipMethod(
        lambda topology, seed: gossip.d2(gossip.lazy(topology.graph), diagnostics=True),
        "parameters over every link, corrected by the last step",
    ),
    "sgp": GossipMethod(
        lambda topology, seed: gossip.sgp(
            gossip.one_peer_exponential(len(topology.graph)), diagnostics=True
        ),
        "half of the parameters and of the mass to one worker in turn",
    ),
    "overlap_sgp": GossipMethod(
        lambda topology, seed: gossip.sgp(
            gossip.one_peer_exponential(len(topology.graph)), overlap=1, diagnostics=True
        ),
        "the same, received one step later",
    ),
    "ad_psgd": GossipMethod(
        lambda topology, seed: gossip.ad_psgd(
            topology.matchings, staleness=1, seed=seed, diagnostics=True
        ),
        "parameters to one random neighbor, with gradients that are one step late",
    ),
}


def methods_of(graph: str) -> list[str]:
    """The methods that are compared on a graph."""
    first = graph == next(iter(GRAPHS))
    return [name for name, method in METHODS.items() if first or method.on_every_graph]
