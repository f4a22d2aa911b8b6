"""The methods of the bench that mix parameters: gossip methods and local training."""

from typing import Any

import networkx as nx
import optax

import jaxcomm
from experiments.bench.aggregators import RATIO, Rows
from experiments.bench.updates import BenchMethod
from jaxcomm import gossip
from jaxcomm.compression import blockwise
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither, e3m0
from jaxcomm.compression.sparsifiers import top_k
from jaxcomm.gossip._matcha_plan import MatchaPlan
from jaxcomm.synchronization import (
    diloco,
    eager_diloco,
    local_sgd,
    pr_sgd,
    slowmo,
    sparseloco,
    streaming_diloco,
)

WORKERS = 8
PERIOD = 3


def _after_sgd(method: optax.GradientTransformation) -> Any:
    return optax.chain(jaxcomm.per_worker(optax.sgd(0.1)), method)


def _outer() -> optax.GradientTransformation:
    return optax.sgd(0.7, momentum=0.5)


LOCAL: Rows = {
    "local_sgd": BenchMethod(lambda: _after_sgd(local_sgd(PERIOD))),
    "slowmo": BenchMethod(lambda: _after_sgd(slowmo(PERIOD, learning_rate=0.1))),
    "diloco": BenchMethod(lambda: diloco(optax.sgd(0.1), _outer(), PERIOD)),
    "pr_sgd": BenchMethod(lambda: pr_sgd(optax.sgd(0.1), PERIOD)),
    "streaming_diloco": BenchMethod(
        lambda: streaming_diloco(
            optax.sgd(0.1), _outer(), PERIOD, fragments=2, overlap=1, mixing_factor=0.5
        )
    ),
    "streaming_diloco_4_bits": BenchMethod(
        lambda: streaming_diloco(
            optax.sgd(0.1),
            _outer(),
            PERIOD,
            fragments=2,
            overlap=1,
            mixing_factor=0.5,
            aggregator=jaxcomm.all_gather_mean(blockwise(e3m0(), 256)),
        )
    ),
    "eager_diloco": BenchMethod(lambda: eager_diloco(optax.sgd(0.1), _outer(), PERIOD)),
    "eager_diloco_delayed": BenchMethod(
        lambda: eager_diloco(optax.sgd(0.1), _outer(), PERIOD, eager=False)
    ),
    "sparseloco": BenchMethod(lambda: sparseloco(optax.sgd(0.1), PERIOD)),
    "muloco": BenchMethod(
        lambda: diloco(
            optax.sgd(0.1),
            _outer(),
            PERIOD,
            aggregator=jaxcomm.all_gather_mean(error_feedback(blockwise(dither(bits=4), 32))),
        )
    ),
}


def _ring() -> nx.Graph:
    return gossip.ring(WORKERS)


def _half() -> MatchaPlan:
    return gossip.matcha_plan(_ring(), budget=0.5)


def _directed() -> gossip.Mixing:
    return gossip.to_mixing(gossip.exponential(WORKERS), "push")


def _compressed(method: Any, mixing: Any) -> BenchMethod:
    return BenchMethod(lambda: method(mixing(), top_k(ratio=RATIO), step_size=0.3))


GOSSIP: Rows = {
    "dpsgd": BenchMethod(lambda: gossip.dpsgd(_ring())),
    "dpsgd_adapt_then_combine": BenchMethod(
        lambda: gossip.dpsgd(gossip.to_mixing(_ring(), "best_constant"), order="adapt_then_combine")
    ),
    "dpsgd_in_turns": BenchMethod(
        lambda: gossip.dpsgd(gossip.cyclic(gossip.one_peer_exponential(WORKERS, directed=False)))
    ),
    "matcha": BenchMethod(lambda: gossip.matcha(_half())),
    "matcha_periodic": BenchMethod(
        lambda: gossip.dpsgd(gossip.random_periodic(_ring(), budget=0.5))
    ),
    "choco_sgd": _compressed(gossip.choco_sgd, _ring),
    "choco_sgd_over_matcha": _compressed(gossip.choco_sgd, _half),
    "deep_squeeze": _compressed(gossip.deep_squeeze, _ring),
    "d2": BenchMethod(lambda: gossip.d2(gossip.lazy_mixing(_ring()))),
    "sgp": BenchMethod(
        lambda: gossip.sgp(gossip.cyclic(gossip.one_peer_exponential(WORKERS), "push"))
    ),
    "sgp_directed": BenchMethod(lambda: gossip.sgp(_directed())),
    "overlap_sgp": BenchMethod(lambda: gossip.sgp(_directed(), overlap=2)),
    "ad_psgd": BenchMethod(lambda: gossip.ad_psgd(_ring(), staleness=2)),
    "noloco": BenchMethod(lambda: gossip.noloco(gossip.random_pairs(WORKERS), PERIOD)),
    "periodic_averaging": BenchMethod(
        lambda: gossip.periodic_averaging(PERIOD, gossip.dpsgd(_ring()))
    ),
}
