"""The strategies and the slow workers of the comparison of stragglers."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import optax

import jaxcomm
from experiments.cli.configs import Stragglers
from experiments.methods.gossip import make_topology
from jaxcomm import gossip, synchronization
from jaxcomm.synchronization import Straggler

WORKERS = 8
BUDGET = 0.5
DEAD_SLOWDOWN = 100.0  # The slowdown of the one slow worker of `dead_slow`.
PARETO_SHAPE = 1.5  # Of the Pareto distribution; below 2, its variance is infinite.

# From the seconds of a mini-batch on a fast worker, or their mean if times are random.
SPEEDS: dict[str, Callable[[float], Straggler]] = {
    "3:1": lambda s: synchronization.deterministic([s] * 4 + [3 * s] * 4),
    "exponential": lambda s: synchronization.exponential(mean=s),
    "pareto": lambda s: synchronization.pareto(
        scale=s * (PARETO_SHAPE - 1) / PARETO_SHAPE, shape=PARETO_SHAPE
    ),
    "dead_slow": lambda s: synchronization.deterministic([s] * 7 + [DEAD_SLOWDOWN * s]),
}


TOPOLOGY = make_topology("erdos_renyi_8")


@functools.cache
def _graph() -> gossip.Mixing:
    return gossip.to_mixing(TOPOLOGY.graph)


@functools.cache
def _plan() -> gossip.MatchaPlan:
    return gossip.matcha_plan(TOPOLOGY.matchings, BUDGET)


class Strategy(NamedTuple):
    """How workers wait for each other and exchange updates."""

    description: str
    build: Callable[[Any, Any, int], optax.GradientTransformation]  # of rate, seed and period
    mixing: Callable[[], Any] | None = None  # the neighbors of each worker; None is all workers
    local: bool = False  # whether a step is one mini-batch, with periodic averaging
    waits_for_all: bool = True  # whether a step waits for all mini-batches of the neighbors
    finishes_late: bool = False  # whether a mini-batch in flight counts in the next window

    @property
    def per_worker_params(self) -> bool:
        """Whether parameters differ by worker."""
        return self.local or self.mixing is not None

    def minibatches(self, config: Stragglers) -> int:
        """The maximum of mini-batches per worker and step."""
        return 1 if self.local else config.minibatches

    def chunk(self, config: Stragglers) -> int:
        """Steps between two logged losses."""
        return config.log_every * config.minibatches // self.minibatches(config)


def _mean(rate: Any, seed: Any, period: int) -> optax.GradientTransformation:
    del seed, period
    return optax.chain(jaxcomm.mean(), optax.sgd(rate))


def _local(rate: Any, seed: Any, period: int) -> optax.GradientTransformation:
    del seed
    return optax.chain(optax.sgd(rate), synchronization.local_sgd(period))


def _dpsgd(rate: Any, seed: Any, period: int) -> optax.GradientTransformation:
    del period
    return optax.chain(
        optax.sgd(rate), gossip.dpsgd(_graph(), order="adapt_then_combine", seed=seed)
    )


def _matcha(rate: Any, seed: Any, period: int) -> optax.GradientTransformation:
    del period
    return optax.chain(optax.sgd(rate), gossip.matcha(_plan(), seed=seed))


STRATEGIES: dict[str, Strategy] = {
    "synchronous": Strategy(
        "an all-reduce after all workers have finished all mini-batches", _mean
    ),
    "local_sgd": Strategy(
        "local steps of one mini-batch, with a periodic all-reduce", _local, local=True
    ),
    "dpsgd": Strategy(
        "gossip between neighbors after they have finished all mini-batches", _dpsgd, mixing=_graph
    ),
    "matcha": Strategy(
        "the same over a random half of the matchings per step", _matcha, mixing=_plan
    ),
    "non_blocking": Strategy(
        "an all-reduce of the finished mini-batches when the fastest worker has finished",
        _mean,
        waits_for_all=False,
    ),
    "non_blocking_late": Strategy(
        "the same; a mini-batch in flight counts in the next window, stale",
        _mean,
        waits_for_all=False,
        finishes_late=True,
    ),
    "non_blocking_dpsgd": Strategy(
        "local steps on the finished mini-batches when the fastest worker has finished, and gossip",
        _dpsgd,
        mixing=_graph,
        waits_for_all=False,
    ),
    "non_blocking_matcha": Strategy(
        "the same over half the matchings", _matcha, mixing=_plan, waits_for_all=False
    ),
}
# The blocking form of each non-blocking strategy.
BLOCKING_FORM = {
    "non_blocking": "synchronous",
    "non_blocking_late": "synchronous",
    "non_blocking_dpsgd": "dpsgd",
    "non_blocking_matcha": "matcha",
}
