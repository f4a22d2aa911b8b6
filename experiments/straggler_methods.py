"""The strategies and the slow workers of the comparison of stragglers."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import optax

import jaxcomm
from experiments.configs import Stragglers
from experiments.gossip_methods import make_topology
from jaxcomm import gossip, synchronization
from jaxcomm.synchronization import Straggler

WORKERS = 8
BUDGET = 0.5
DEAD_SLOWDOWN = 100.0  # How many times slower the worker is that is as good as dead.
PARETO_SHAPE = 1.5  # Of Pareto's distribution, whose variance is infinite below 2.

# From the seconds of a mini-batch on a fast worker; of random times, their mean.
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
    """How workers wait for each other, and what they make of it."""

    description: str
    build: Callable[[Any, Any, int], optax.GradientTransformation]  # of rate, seed and period
    mixing: Callable[[], Any] | None = None  # whom a worker talks to; nobody but all where None
    local: bool = False  # whether a step is one mini-batch, with a meeting now and then
    waits_for_all: bool = True  # for all mini-batches of those whom a worker meets
    finishes_late: bool = False  # whether a mini-batch in flight counts in the next window

    @property
    def per_worker_params(self) -> bool:
        """Whether parameters differ by worker."""
        return self.local or self.mixing is not None

    def minibatches(self, config: Stragglers) -> int:
        """Of a worker in a step, at most."""
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
    "synchronous": Strategy("all-reduce, when all have done all their mini-batches", _mean),
    "local_sgd": Strategy(
        "own steps of one mini-batch, an all-reduce now and then", _local, local=True
    ),
    "dpsgd": Strategy(
        "neighbours mix, when they have done all their mini-batches", _dpsgd, mixing=_graph
    ),
    "matcha": Strategy(
        "the same over half the matchings, drawn in each step", _matcha, mixing=_plan
    ),
    "non_blocking": Strategy(
        "all-reduce of what is finished when the first worker is done", _mean, waits_for_all=False
    ),
    "non_blocking_late": Strategy(
        "the same; a mini-batch in flight counts in the next window, stale",
        _mean,
        waits_for_all=False,
        finishes_late=True,
    ),
    "non_blocking_dpsgd": Strategy(
        "own steps with what is finished when the first worker is done, and mixing",
        _dpsgd,
        mixing=_graph,
        waits_for_all=False,
    ),
    "non_blocking_matcha": Strategy(
        "the same over half the matchings", _matcha, mixing=_plan, waits_for_all=False
    ),
}
# What each is the non-blocking form of.
BLOCKING_FORM = {
    "non_blocking": "synchronous",
    "non_blocking_late": "synchronous",
    "non_blocking_dpsgd": "dpsgd",
    "non_blocking_matcha": "matcha",
}
