"""The methods, their forms, and the slow workers of the study of stragglers."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import optax

import jaxcomm
from experiments.methods.gossip import make_topology
from jaxcomm import gossip, synchronization
from jaxcomm.gossip._matcha_plan import MatchaPlan
from jaxcomm.synchronization import Straggler

WORKERS = 8
BUDGET = 0.5
DEAD_SLOWDOWN = 100.0
PARETO_SHAPE = 1.5  # Below 2, so the variance is infinite.
SLEEP, SLEEPING = 20, 0.05  # How much longer a mini-batch takes with a sleep, and how often.
SLOW_WORKER = WORKERS - 1  # No worker is slower.

TOPOLOGY = make_topology("erdos_renyi_8")


class Speeds(NamedTuple):
    """A model of slow workers."""

    description: str
    straggler: Callable[[float], Straggler]  # From the seconds of a mini-batch, see below.
    is_random: bool = False
    slowdown: float = 1.0  # The mean time of the slowest worker over that of the fastest.


def _with_delay(straggler: Straggler, delay: Straggler) -> Straggler:
    """The times of a straggler plus random delays."""
    return Straggler(
        lambda *arguments: straggler.sample(*arguments) + delay.sample(*arguments),
        lambda workers: straggler.means(workers) + delay.means(workers),
        None,
        straggler.minimum + delay.minimum,
    )


def _two_speeds(s: float) -> Straggler:
    return synchronization.deterministic([s] * 4 + [3 * s] * 4)


# The number is the seconds of a mini-batch on a fast worker, or their mean if times are random.
SPEEDS: dict[str, Speeds] = {
    "3:1": Speeds("half of the workers are three times slower", _two_speeds, slowdown=3),
    "exponential": Speeds(
        "exponential times with the same mean for each worker",
        lambda s: synchronization.shifted_exponential(mean=s),
        is_random=True,
    ),
    "pareto": Speeds(
        f"Pareto times with the exponent {PARETO_SHAPE:g} and the same mean for each worker",
        lambda s: synchronization.pareto(
            scale=s * (PARETO_SHAPE - 1) / PARETO_SHAPE, shape=PARETO_SHAPE
        ),
        is_random=True,
    ),
    "sleep": Speeds(
        f"one of {1 / SLEEPING:.0f} mini-batches takes {1 + SLEEP} times as long as the others, "
        "with the same mean for each worker",
        lambda s: synchronization.bernoulli_sleep(
            base=s / (1 + SLEEP * SLEEPING),
            sleep=SLEEP * s / (1 + SLEEP * SLEEPING),
            probability=SLEEPING,
        ),
        is_random=True,
    ),
    "delay": Speeds(
        "`3:1`, plus an exponential delay of each mini-batch with the mean of a fast mini-batch. "
        "The paper's analysis has these two causes, the throughput of devices and random delays; "
        "its distributions and their parameters were not available",
        lambda s: _with_delay(_two_speeds(s), synchronization.shifted_exponential(mean=s)),
        is_random=True,
        slowdown=2,
    ),
    "dead_slow": Speeds(
        f"one worker is {DEAD_SLOWDOWN:g} times slower",
        lambda s: synchronization.deterministic([s] * 7 + [DEAD_SLOWDOWN * s]),
        slowdown=DEAD_SLOWDOWN,
    ),
}

# What the workers wait for before they exchange updates.
BLOCKING = "blocking"
NEW_TIME = "abort_new_time"
FINISH_LATE = "finish_late"
FORMS: dict[str, str] = {
    BLOCKING: "workers wait until those from which they receive have finished all mini-batches",
    NEW_TIME: "a window ends when the fastest worker has finished; the others abort the mini-batch "
    "in flight and restart it in the next window with a new random time",
    "abort_same_time": "the same, but the restarted mini-batch takes as long as it would have",
    FINISH_LATE: "the same end of a window; a mini-batch in flight counts in a later window, with "
    "the gradient at the parameters at which it began",
}


def forms_of(method: str, speeds: str) -> list[str]:
    """The different forms of a method. Without random times, both forms that abort are the same."""
    if METHODS[method].is_local:
        return [BLOCKING]
    return [name for name in FORMS if name != NEW_TIME or SPEEDS[speeds].is_random]


@functools.cache
def _graph() -> gossip.Mixing:
    return gossip.to_mixing(TOPOLOGY.graph)


@functools.cache
def _plan() -> MatchaPlan:
    return gossip.matcha_plan(TOPOLOGY.matchings, BUDGET)


class Method(NamedTuple):
    """How workers exchange updates."""

    description: str
    build: Callable[[Any, Any, Any], optax.GradientTransformation]  # of rate, seed and period
    mixing: Callable[[], Any] | None = None  # the neighbors of each worker; None is all workers
    is_local: bool = False  # whether a step is one mini-batch, with periodic averaging

    @property
    def per_worker_params(self) -> bool:
        """Whether parameters differ by worker."""
        return self.is_local or self.mixing is not None


def _mean(rate: Any, seed: Any, period: Any) -> optax.GradientTransformation:
    del seed, period
    return optax.chain(jaxcomm.mean(), optax.sgd(rate))


def _local(rate: Any, seed: Any, period: Any) -> optax.GradientTransformation:
    del seed
    return optax.chain(optax.sgd(rate), synchronization.local_sgd(lambda step: period))


def _dpsgd(rate: Any, seed: Any, period: Any) -> optax.GradientTransformation:
    del period
    return optax.chain(
        optax.sgd(rate), gossip.dpsgd(_graph(), order="adapt_then_combine", seed=seed)
    )


def _matcha(rate: Any, seed: Any, period: Any) -> optax.GradientTransformation:
    del period
    return optax.chain(optax.sgd(rate), gossip.matcha(_plan(), seed=seed))


METHODS: dict[str, Method] = {
    "all_reduce": Method("the mean over all workers, which is synchronous SGD if blocking", _mean),
    "local_sgd": Method(
        "local steps of one mini-batch, with a periodic all-reduce", _local, is_local=True
    ),
    "dpsgd": Method(
        "local steps and gossip with all neighbors, on the graph of figure 1a of MATCHA's paper",
        _dpsgd,
        mixing=_graph,
    ),
    "matcha": Method("the same over a random half of the matchings per step", _matcha, _plan),
}
