"""The cells of the study of convergence: strategies x compressions, with the bounds of papers.

A strategy says who communicates and when, a compression what is sent. A codec joins by one row of
`COMPRESSIONS`; its constant is what it claims.
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
from jaxcomm.compression.feedback import error_feedback
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
    return jaxcomm.mean() if codec is None else jaxcomm.all_gather_mean("data", codec, seed=seed)


def _graph(name: str, workers: int) -> Any:
    if name == "torus":
        side = round(workers**0.5)
        return gossip.torus(side, side)
    return gossip.hypercube(workers) if name == "hypercube" else gossip.ring(workers)


def gap(name: str, workers: int) -> float:
    """The inverse of the spectral gap of the Metropolis weights of a graph."""
    return 1 / gossip.spectral(gossip.mixing_matrix(_graph(name, workers))).gap


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
        lambda codec, period, seed, n: local_sgd(period, _mean(codec, seed)),
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
        lambda codec, graph, rate, n: events.ad_psgd(optax.sgd(rate), _graph(graph, n)),
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

STRONG = "σ²/(μ n T)"
_NOISE = f"(1 + ω) {STRONG}"


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of the table: a strategy, a compression, and what the bound of a paper says.

    Attributes:
      strategy: The name of the strategy.
      compression: The name of the compression; None sends exact numbers.
      bound: The leading term for strongly convex losses.
      source: The paper.
      constant: The predicted exponent of the constant.
    """

    strategy: str
    compression: str | None
    bound: str
    source: str
    constant: float = 0.0

    @property
    def of_strategy(self) -> Strategy:
        """The strategy."""
        return STRATEGIES[self.strategy]

    @property
    def of_codec(self) -> Compression | None:
        """The compression."""
        return None if self.compression is None else COMPRESSIONS[self.compression]

    @property
    def strengths(self) -> int:
        """The number of values of the constant that are compared; 1 without a constant."""
        values = self.of_codec.codecs if self.of_codec else self.of_strategy.parameters
        return len(values)

    @property
    def symbol(self) -> str:
        """The name of the constant."""
        return self.of_codec.symbol if self.of_codec else self.of_strategy.symbol

    def parts(self, strength: int) -> tuple[jaxcomm.Codec | None, Any]:
        """The codec, with its feedback, and the parameter of the strategy."""
        compression = self.of_codec
        if compression is None:
            return None, self.of_strategy.parameters[strength]
        codec = compression.codecs[strength]
        keeps = compression.has_feedback and self.strategy != "gossip"  # CHOCO is feedback.
        return error_feedback(codec) if keeps else codec, self.of_strategy.parameters[0]

    def value(self, strength: int, workers: int) -> float:
        """The value of the constant."""
        if self.of_codec:
            return self.of_codec.constant(strength)
        strategy = self.of_strategy
        return strategy.constant(strategy.parameters[strength], workers) if self.symbol else 1.0

    def stretch(self, strength: int) -> float:
        """How much smaller than 1 / L the first rate is; the stretches of both parts add up."""
        by_codec = self.of_codec.constant(strength) if self.of_codec else 1.0
        parameter = self.parts(strength)[1]
        return by_codec + self.of_strategy.stretch(parameter) - 1


BOTTOU = "Bottou, Curtis, Nocedal 2018, arXiv 1606.04838, theorem 4.7"
ALISTARH = "Alistarh et al. 2017, arXiv 1610.02132, theorem 3.4"
STICH = "Stich, Karimireddy 2019, arXiv 1909.05350, theorem 16"
FEEDBACK = (
    "Stich, Cordonnier, Jaggi 2018, arXiv 1809.07599; Karimireddy et al. 2019, arXiv 1901.09847"
)
LOCAL = "Stich 2018, arXiv 1805.09767, theorem 2.2"
FEDPAQ = "Reisizadeh et al. 2020, arXiv 1909.13014, theorem 1"
OF_CODEC = "the variance of the codec"
QSPARSE = "Basu et al. 2019, arXiv 1906.02367, theorem 3"
UNIFIED = "Koloskova et al. 2020, arXiv 2003.10422, theorem 2"
CHOCO = "Koloskova, Stich, Jaggi 2019, arXiv 1902.00340, theorem 4"
HO = "Ho et al. 2013 (SSP); Stich, Karimireddy 2019, arXiv 1909.05350"
LIAN = "Lian et al. 2015, arXiv 1506.08272, theorem 1"
AD_PSGD = "Lian et al. 2018, arXiv 1710.06952, theorem 1"

CELLS: Mapping[str, Cell] = {
    "exact mean": Cell("synchronous", None, STRONG, BOTTOU),
    "dither": Cell("synchronous", "dither", _NOISE, ALISTARH, 1.0),
    "random-k": Cell("synchronous", "random_k", _NOISE, ALISTARH, 1.0),
    "dither, feedback": Cell("synchronous", "ef_dither", STRONG, FEEDBACK),
    "top-k, feedback": Cell("synchronous", "ef_top_k", STRONG, FEEDBACK),
    "delayed": Cell("delayed", None, STRONG, STICH),
    "delayed, dither": Cell("delayed", "dither", _NOISE, f"{STICH}, with {OF_CODEC}", 1.0),
    "delayed, top-k, feedback": Cell("delayed", "ef_top_k", STRONG, STICH),
    "local": Cell("local", None, STRONG, LOCAL),
    "local, dither": Cell("local", "dither", _NOISE, FEDPAQ, 1.0),
    "local, top-k, feedback": Cell("local", "ef_top_k", STRONG, QSPARSE),
    "SSP": Cell("ssp", None, STRONG, HO),
    "asynchronous": Cell("asynchronous", None, STRONG, LIAN),
    "asynchronous, dither": Cell("asynchronous", "dither", _NOISE, f"{LIAN}, with {OF_CODEC}", 1.0),
    "asynchronous, top-k, feedback": Cell("asynchronous", "ef_top_k", STRONG, STICH),
    "D-PSGD": Cell("gossip", None, STRONG, UNIFIED),
    "CHOCO, dither": Cell("gossip", "ef_dither", STRONG, CHOCO),
    "CHOCO, top-k": Cell("gossip", "ef_top_k", STRONG, CHOCO),
    "AD-PSGD, in step": Cell("gossip_delayed", None, STRONG, AD_PSGD),
    "AD-PSGD": Cell("ad_psgd", None, STRONG, AD_PSGD),
    "D-PSGD every H steps": Cell("local_gossip", None, STRONG, UNIFIED),
}


def reason(problem: str, cell: str, quantity: str, is_slower: bool) -> str:
    """Why a cell does not agree, as far as it is known."""
    return REASONS.get((problem, cell, quantity, is_slower), "Not explained.")


REASONS: Mapping[tuple[str, str, str, bool], str] = {}
