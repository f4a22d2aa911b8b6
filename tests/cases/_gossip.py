"""Gossip: every method with the mixing it runs, its equations in NumPy, and its bytes."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
import optax
import pytest

from jaxcomm import compression, gossip
from jaxcomm.gossip._matcha_plan import MatchaPlan
from tests.gossip import oracle

K, STEP_SIZE = 3, 0.3


class GossipCase(NamedTuple):
    """A method and its claims.

    Attributes:
      name: Shown in test ids.
      make: `workers -> transformation`, cached so that tests share compiled programs.
      mixing: `workers -> Mixing`, the mixing that it runs.
      oracle: `(x, updates, W) -> x after each step`, in NumPy.
      drift: By how much the mean of workers may be off after 1000 steps, in float32.
      double: By how much float64 parameters may be off after a few steps.
      floor: By how many units in the last place bfloat16 workers may differ; `None`: no claim.
      message: Bytes sent to one neighbor, of 12 float32 parameters.
      sends: Messages that a worker of 8 sends in its costliest step.
      sums: Whether sums of parameters and masses are kept, in place of the mean of parameters.
      late: By how many steps updates come later.
      powers_of_2: Whether it requires a power of 2 of workers.
      absence: Whether workers may be absent; else `present` is refused by name.
      corrects: Whether equal workers may diverge again, by corrections of their steps.
    """

    name: str
    make: Callable[[int], optax.GradientTransformationExtraArgs]
    mixing: Callable[[int], gossip.Mixing]
    oracle: Callable[..., np.ndarray]
    drift: float = 2e-5
    double: float = 1e-13
    floor: float | None = 6
    message: int = 12 * 4
    sends: int = 2
    sums: bool = False
    late: int = 0
    powers_of_2: bool = False
    absence: bool = True
    corrects: bool = False

    def __repr__(self) -> str:
        return self.name


def _case(
    name: str, mixing: Callable[[int], Any], method: Callable[[Any], Any], *rest: Any, **claims: Any
) -> GossipCase:
    return GossipCase(
        name,
        cache(lambda workers: method(mixing(workers))),
        cache(lambda workers: gossip.to_mixing(mixing(workers))),
        *rest,
        **claims,
    )


def _largest() -> Any:
    return compression.sparsifiers.top_k(k=K)


def _matchings(graph: nx.Graph) -> gossip.Mixing:
    """The matchings of a graph, one at random in each step, as pairs that average."""
    plan = gossip.matcha_plan(graph, budget=1)
    parts = []
    for matching in plan.matchings or [()]:
        part = nx.empty_graph(len(graph))
        part.add_edges_from(matching)
        parts.append(part)
    return gossip.randomized(parts)


def _one_peer(workers: int) -> gossip.Mixing:
    return gossip.cyclic(gossip.one_peer_exponential(workers), "push")


def _pairs(workers: int) -> gossip.Mixing:
    return gossip.cyclic(gossip.one_peer_exponential(workers, directed=False))


@cache
def _half(workers: int) -> MatchaPlan:
    return gossip.matcha_plan(gossip.ring(workers), budget=0.5)


def _directed(workers: int) -> gossip.Mixing:
    """Not regular, so that masses differ."""
    graph = gossip.exponential(workers)
    graph.add_edges_from((0, j) for j in range(1, workers))
    return gossip.to_mixing(graph, "push")


# Values, which are float32, and places of 4 bits in one word.
SPARSE = {"message": K * 4 + 4, "double": 2e-6}
MASS = {"message": 12 * 4 + 4, "sums": True}
GOSSIP = [
    _case("dpsgd", gossip.ring, gossip.dpsgd, oracle.combine_then_adapt),
    _case(
        "dpsgd_adapt_then_combine",
        lambda n: gossip.to_mixing(gossip.ring(n), "best_constant"),
        partial(gossip.dpsgd, order="adapt_then_combine"),
        oracle.adapt_then_combine,
    ),
    _case(
        "dpsgd_in_turns", _pairs, gossip.dpsgd, oracle.combine_then_adapt, sends=1, powers_of_2=True
    ),
    _case("matcha", _half, gossip.matcha, oracle.adapt_then_combine),
    _case(
        "matcha_periodic",
        lambda n: gossip.random_periodic(gossip.ring(n), budget=0.5),
        gossip.dpsgd,
        oracle.combine_then_adapt,
    ),
    _case(
        "choco_sgd",
        gossip.ring,
        lambda mixing: gossip.choco_sgd(mixing, _largest(), step_size=STEP_SIZE),
        partial(oracle.choco, k=K, step_size=STEP_SIZE),
        absence=False,
        floor=30,
        **SPARSE,
    ),
    _case(
        "choco_sgd_over_matcha",
        _half,
        lambda mixing: gossip.choco_sgd(mixing, _largest(), step_size=STEP_SIZE),
        partial(oracle.choco_by_neighbour, k=K, step_size=STEP_SIZE),
        floor=30,
        **SPARSE,
    ),
    _case(
        "deep_squeeze",
        gossip.ring,
        lambda mixing: gossip.deep_squeeze(mixing, _largest(), step_size=STEP_SIZE),
        partial(oracle.deep_squeeze, k=K, step_size=STEP_SIZE),
        floor=None,  # The codec's error is far above it.
        **SPARSE,
    ),
    _case(
        "d2",
        lambda n: gossip.lazy_mixing(gossip.ring(n)),
        gossip.d2,
        oracle.d2,
        drift=1e-4,
        corrects=True,
    ),
    _case(
        "sgp",
        _one_peer,
        gossip.sgp,
        oracle.push,
        sends=1,
        **MASS,
    ),
    _case("sgp_directed", _directed, gossip.sgp, oracle.push, sends=7, **MASS),
    _case(
        "overlap_sgp",
        _directed,
        partial(gossip.sgp, overlap=2),
        partial(oracle.push, delay=2),
        sends=7,
        **MASS,
    ),
    GossipCase(
        "ad_psgd",
        cache(lambda n: gossip.ad_psgd(gossip.ring(n), staleness=2)),
        cache(lambda n: _matchings(gossip.ring(n))),
        partial(oracle.late_steps, staleness=2),
        sends=1,
        late=2,
    ),
    _case(
        "noloco",  # Its momentum and rates have a test of their own.
        gossip.random_pairs,
        lambda mixing: gossip.noloco(mixing, 1, momentum=0.0, learning_rate=1.0),
        oracle.adapt_then_combine,
        sends=1,
    ),
    _case(
        "periodic_averaging",
        gossip.ring,
        lambda mixing: gossip.periodic_averaging(3, gossip.dpsgd(mixing)),
        partial(oracle.exact_now_and_then, every=3),
    ),
]

# One for each kind of messages: always, drawn, encoded, with copies per neighbor, with masses.
QUICK = {"dpsgd", "matcha", "choco_sgd", "choco_sgd_over_matcha", "overlap_sgp"}


def gossip_rows(workers: int, quick: set[str] = QUICK) -> list:
    """Rows for `pytest.mark.parametrize` that allow this number of workers."""
    return [
        pytest.param(case, marks=[] if case.name in quick else [pytest.mark.slow])
        for case in GOSSIP
        if not (case.powers_of_2 and workers & (workers - 1))
    ]
