"""The graphs and the methods of the comparison of gossip."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import networkx as nx
import optax

from jaxcomm import compression, gossip
from jaxcomm.gossip._matcha_plan import MatchaPlan

BUDGET = 0.5
BASELINE, CLAIMED = "dpsgd", "matcha"

# Connected graphs as matchings. The first and the last are from figures 1a and 3b of the paper.
MATCHINGS: Mapping[str, Sequence[Sequence[tuple[int, int]]]] = {
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
GENERATED: Mapping[str, Callable[[], nx.Graph]] = {
    "torus_64": lambda: gossip.torus(8, 8),
    "exponential_64": lambda: gossip.exponential(64, directed=False),
}
GRAPHS = (*MATCHINGS, *GENERATED)
FIRST = GRAPHS[0]
IRREGULAR = ("erdos_renyi_8", "erdos_renyi_16")


@dataclasses.dataclass(frozen=True, eq=False)
class Topology:
    """A graph, and what MATCHA needs of it.

    Attributes:
      graph: The graph.
      matchings: Its matchings, or the graph, which the library then decomposes.
    """

    graph: nx.Graph
    matchings: Any

    @property
    def degree(self) -> int:
        """The largest degree, which is the number of rounds in which all links are used once."""
        return max(degree for _, degree in self.graph.degree)

    @functools.cached_property
    def plan(self) -> MatchaPlan:
        """MATCHA's plan for the budget. For 64 workers it takes ten seconds."""
        return gossip.matcha_plan(self.matchings, BUDGET)


@functools.cache
def make_topology(name: str) -> Topology:
    """The graph of that name."""
    if name in MATCHINGS:
        return Topology(
            nx.Graph(edge for each in MATCHINGS[name] for edge in each), MATCHINGS[name]
        )
    graph = GENERATED[name]()
    return Topology(graph, graph)


def _degree(topology: Topology) -> float:
    return topology.degree


def _active(topology: Topology) -> float:
    return topology.plan.expected_rounds


def _one(topology: Topology) -> float:
    return 1


class GossipMethod(NamedTuple):
    """A gossip method.

    Attributes:
      build: Makes its transformation from the graph and a seed.
      sends: What a worker sends.
      rounds: The expected number of rounds of messages per step.
      graphs: The graphs on which it is compared.
    """

    build: Callable[[Topology, Any], optax.GradientTransformation]
    sends: str
    rounds: Callable[[Topology], float] = _degree
    graphs: Sequence[str] = (FIRST,)


def _top_10_percent() -> Any:
    return compression.sparsifiers.top_k(ratio=0.1)


def _four_bits() -> Any:
    return compression.blockwise(compression.quantizers.dither(levels=7), block_size=32)


METHODS: dict[str, GossipMethod] = {
    BASELINE: GossipMethod(
        lambda topology, seed: gossip.dpsgd(
            topology.graph, order="adapt_then_combine", diagnostics=True
        ),
        "parameters over every link in every step, with Metropolis weights, which are positive",
        graphs=GRAPHS,
    ),
    "dpsgd_best_constant": GossipMethod(
        lambda topology, seed: gossip.dpsgd(
            gossip.to_mixing(topology.graph, "best_constant"),
            order="adapt_then_combine",
            diagnostics=True,
        ),
        "the same, with one weight for all links, the best for consensus, as MATCHA and `periodic` "
        "have; a worker with many neighbors then has a negative weight of itself",
        graphs=IRREGULAR,
    ),
    "dpsgd_bfloat16": GossipMethod(  # With a lossless codec and this step size, it is D-PSGD.
        lambda topology, seed: gossip.choco_sgd(
            topology.graph,
            compression.quantizers.cast(jnp.bfloat16),
            step_size=1.0,
            seed=seed,
            diagnostics=True,
        ),
        "bfloat16 differences to the copies of the parameters at neighbors, over every link: "
        "D-PSGD with messages of 16 bits",
        graphs=GRAPHS,
    ),
    CLAIMED: GossipMethod(
        lambda topology, seed: gossip.matcha(topology.plan, seed=seed, diagnostics=True),
        "parameters over a random half of the matchings per step",
        _active,
        GRAPHS,
    ),
    "periodic": GossipMethod(
        lambda topology, seed: gossip.dpsgd(
            gossip.random_periodic(topology.graph, BUDGET),
            order="adapt_then_combine",
            seed=seed,
            diagnostics=True,
        ),
        "parameters over every link in a random half of the steps",
        lambda topology: BUDGET * topology.degree,
        GRAPHS,
    ),
    "choco_sgd": GossipMethod(
        lambda topology, seed: gossip.choco_sgd(
            topology.graph, _top_10_percent(), step_size=0.3, seed=seed, diagnostics=True
        ),
        "the largest 10 % of the differences to the copies of the parameters at neighbors",
    ),
    "choco_sgd_over_matcha": GossipMethod(
        lambda topology, seed: gossip.choco_sgd(
            topology.plan, _top_10_percent(), step_size=0.3, seed=seed, diagnostics=True
        ),
        "the same over half the matchings, with copies per neighbor",
        _active,
    ),
    "deep_squeeze": GossipMethod(
        lambda topology, seed: gossip.deep_squeeze(
            topology.graph, _four_bits(), step_size=0.5, seed=seed, diagnostics=True
        ),
        "parameters in 4 bits, in blocks of 32, with feedback",
    ),
    "d2": GossipMethod(
        lambda topology, seed: gossip.d2(gossip.lazy_mixing(topology.graph), diagnostics=True),
        "parameters over every link, corrected by the last step",
        graphs=(FIRST, "torus_64"),
    ),
    "sgp": GossipMethod(
        lambda topology, seed: gossip.sgp(
            gossip.one_peer_exponential(len(topology.graph)), diagnostics=True
        ),
        "half of the parameters and of the mass to one worker in turn, on the exponential graph",
        _one,
        (FIRST, "torus_64"),
    ),
    "overlap_sgp": GossipMethod(
        lambda topology, seed: gossip.sgp(
            gossip.one_peer_exponential(len(topology.graph)), overlap=1, diagnostics=True
        ),
        "the same, received one step later",
        _one,
    ),
    "ad_psgd": GossipMethod(
        lambda topology, seed: gossip.ad_psgd(
            topology.matchings, staleness=1, seed=seed, diagnostics=True
        ),
        "parameters to one random neighbor, with gradients that are one step late",
        _one,
    ),
}


def methods_of(graph: str) -> list[str]:
    """The methods that are compared on a graph."""
    return [name for name, method in METHODS.items() if graph in method.graphs]
