"""Strategies, which say who communicates and when, and compressions, which say what is sent.

A codec joins by one row of `COMPRESSIONS`; its constant is what it claims.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax

import jaxcomm
from experiments.tasks.objectives import DIMENSION
from jaxcomm import gossip
from jaxcomm.compression import scaled
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import random_k, top_k
from jaxcomm.synchronization import events, local_sgd

LOCAL_STEPS, DELAY = 4, 3
Rate = Callable[[jax.Array], jax.Array]
"""`number of steps so far -> learning rate`."""


@dataclasses.dataclass(frozen=True)
class Compression:
    """A row: codecs of one kind.

    Attributes:
      kind: What is sent.
      codecs: From the one of the main comparison to others, of another strength each.
      has_feedback: Whether the error is kept and sent later.
    """

    kind: str
    codecs: tuple[jaxcomm.Codec, ...]
    has_feedback: bool = False

    def constant(self, strength: int) -> float:
        r"""1 + omega of an unbiased codec, or 1 / delta of a contraction, as the codec claims."""
        claims = self.codecs[strength].claims
        if claims.variance is not None:
            return 1 + claims.variance(DIMENSION, 1)
        return 1 / claims.contraction(DIMENSION, 1)

    @property
    def symbol(self) -> str:
        """The name of the constant in bounds."""
        return "1/delta" if self.has_feedback else "1 + omega"


COMPRESSIONS: Mapping[str, Compression] = {
    "dither": Compression("quantized", tuple(dither(levels=s, norm="l2") for s in (4, 1, 16))),
    "random_k": Compression("sparsified", tuple(random_k(k=k) for k in (16, 4, 32))),
    "ef_dither": Compression(
        "quantized",
        tuple(scaled(dither(levels=s, norm="l2")) for s in (4, 1, 16)),
        has_feedback=True,
    ),
    "ef_top_k": Compression(
        "sparsified", tuple(top_k(k=k) for k in (16, 4, 32)), has_feedback=True
    ),
}


@dataclasses.dataclass(frozen=True)
class Strategy:
    """Who communicates, and when.

    Attributes:
      architecture: The survey's architecture.
      synchronization: The survey's synchronization.
      build: `(codec or None, parameter, seed, workers) -> ` what follows the gradient: an
        aggregator, a transformation of gossip, or a policy of events that also takes the rate.
      parameters: From the one of the main comparison to others.
      symbol: The name of the constant that belongs to the parameter.
      constant: `(parameter, workers) -> constant`.
      stretch: `(parameter) -> ` how much smaller than 1 / L the first rate is.
      per_worker: Whether parameters differ by worker.
      is_simulated: Whether events are simulated one by one, on a clock.
    """

    architecture: str
    synchronization: str
    build: Callable[..., Any]
    parameters: tuple[Any, ...] = ()
    symbol: str = ""
    constant: Callable[[Any, int], float] = lambda parameter, workers: float(parameter)
    stretch: Callable[[Any], float] = lambda parameter: 1.0
    per_worker: bool = False
    is_simulated: bool = False


def _mean(codec: jaxcomm.Codec | None, seed: Any) -> optax.GradientTransformationExtraArgs:
    return jaxcomm.mean() if codec is None else jaxcomm.all_gather_mean(codec, seed=seed)


def _graph(name: str, workers: int) -> Any:
    if name == "torus":
        side = round(workers**0.5)
        return gossip.torus(side, side)
    return gossip.hypercube(workers) if name == "hypercube" else gossip.ring(workers)


def gap(name: str, workers: int) -> float:
    """The inverse of the spectral gap of the Metropolis weights of a graph."""
    return 1 / gossip.to_mixing(_graph(name, workers)).gap


def _choco(codec: jaxcomm.Codec, graph: str, seed: Any, workers: int) -> Any:
    contraction = codec if codec.claims.contraction else scaled(codec)
    delta = contraction.claims.contraction(DIMENSION, 1)
    return gossip.choco_sgd(
        _graph(graph, workers), contraction, step_size=min(0.9, delta), seed=seed
    )


def _local_gossip(period: int, workers: int) -> Any:
    mixed = gossip.mixing_matrix(_graph("hypercube", workers))
    apart = [np.eye(workers)] * (period - 1)
    return gossip.dpsgd(gossip.cyclic([*apart, mixed]), order="adapt_then_combine")


GRAPHS = ("hypercube", "torus", "ring")
PERIODS = (LOCAL_STEPS, 2, 8)
DELAYS = (DELAY, 1, 7)

STRATEGIES: Mapping[str, Strategy] = {
    "synchronous": Strategy(
        "all-reduce", "synchronous", lambda codec, _, seed, n: _mean(codec, seed), (None,)
    ),
    "delayed": Strategy(
        "all-reduce",
        "stale",
        lambda codec, delay, seed, n: jaxcomm.delayed(_mean(codec, seed), delay),
        DELAYS,
        "tau + 1",
        lambda delay, n: delay + 1.0,
        lambda delay: delay + 1.0,
    ),
    "local": Strategy(
        "all-reduce",
        "local",
        lambda codec, period, seed, n: local_sgd(period, aggregator=_mean(codec, seed)),
        PERIODS,
        "H",
        stretch=float,
        per_worker=True,
    ),
    "ssp": Strategy(
        "server",
        "stale",
        lambda codec, staleness, rate, n: events.stale_synchronous(optax.sgd(rate), staleness),
        DELAYS,
        "s + 1",
        lambda staleness, n: staleness + 1.0,
        lambda staleness: staleness + 1.0,
        is_simulated=True,
    ),
    "asynchronous": Strategy(
        "server",
        "asynchronous",
        lambda codec, _, rate, n: events.parameter_server(
            optax.sgd(lambda count: rate(count / n) / n), codec=codec
        ),
        (None,),
        stretch=lambda _: 4.0,
        is_simulated=True,
    ),
    "gossip": Strategy(
        "gossip",
        "synchronous",
        lambda codec, graph, seed, n: (
            gossip.dpsgd(_graph(graph, n), order="adapt_then_combine")
            if codec is None
            else _choco(codec, graph, seed, n)
        ),
        GRAPHS,
        "1/gap",
        gap,
        per_worker=True,
    ),
    "gossip_delayed": Strategy(
        "gossip",
        "stale",
        lambda codec, delay, seed, n: gossip.ad_psgd(
            _graph("hypercube", n), staleness=delay, seed=seed
        ),
        DELAYS,
        "tau + 1",
        lambda delay, n: delay + 1.0,
        lambda delay: delay + 1.0,
        per_worker=True,
    ),
    "ad_psgd": Strategy(
        "gossip",
        "asynchronous",
        lambda codec, graph, rate, n: events.asynchronous_pairs(optax.sgd(rate), _graph(graph, n)),
        GRAPHS,
        "1/gap",
        gap,
        lambda _: 4.0,
        is_simulated=True,
    ),
    "local_gossip": Strategy(
        "gossip",
        "local",
        lambda codec, period, seed, n: _local_gossip(period, n),
        PERIODS,
        "H",
        stretch=float,
        per_worker=True,
    ),
}
