"""The cells of the study of convergence: strategies x compressions, with the bounds of papers."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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

# What is sent. The first codec is the one of the main comparison.

DITHERS = [dither(levels=levels, norm="l2") for levels in (4, 1, 16)]
COMPRESSIONS = {
    "dither": DITHERS,
    "random_k": [random_k(k=k) for k in (16, 4, 32)],
    "ef_dither": [scaled(codec) for codec in DITHERS],
    "ef_top_k": [top_k(k=k) for k in (16, 4, 32)],
}


def constant_of(codec: jaxcomm.Codec) -> float:
    """1 + omega of an unbiased codec, or 1 / delta of a contraction, as the codec claims."""
    if codec.claims.variance is not None:
        return 1 + codec.claims.variance(DIMENSION, 1)
    return 1 / codec.claims.contraction(DIMENSION, 1)


# Who communicates, and when.

GRAPHS = {
    "hypercube": gossip.hypercube,
    "torus": lambda n: gossip.torus(side := 2 ** (n.bit_length() // 2), n // side),
    "ring": gossip.ring,
}


def constant_at(symbol: str, parameter: Any, workers: int) -> float:
    """The constant that has a symbol in bounds, from the parameter of the strategy."""
    if symbol == "1/gap":
        return 1 / gossip.to_mixing(GRAPHS[parameter](workers)).gap
    return {"": 1.0, "H": parameter}.get(symbol) or parameter + 1.0


class Strategy(NamedTuple):
    """Who communicates, and when.

    Attributes:
      build: `(codec or None, parameter, seed, workers) -> ` what follows the gradient: an
        aggregator, or a transformation of gossip. If events are simulated, `(codec or None,
        parameter, rate, workers) -> policy`, with a schedule as the rate.
      parameters: From the one of the main comparison to others.
      symbol: The name of the constant that belongs to the parameter.
      stretch: How much smaller than 1 / L the first rate is; None if by the constant.
      per_worker: Whether parameters differ by worker.
      is_simulated: Whether events are simulated one by one, on a clock.
    """

    build: Callable[..., Any]
    parameters: Sequence[Any] = (None,)
    symbol: str = ""
    stretch: float | None = None
    per_worker: bool = False
    is_simulated: bool = False


def _mean(codec, seed):
    return jaxcomm.mean() if codec is None else jaxcomm.all_gather_mean(codec, seed=seed)


def _gossip(codec, graph, seed, workers):
    if codec is None:
        return gossip.dpsgd(GRAPHS[graph](workers), order="adapt_then_combine")
    delta = codec.claims.contraction(DIMENSION, 1)
    return gossip.choco_sgd(GRAPHS[graph](workers), codec, step_size=min(0.9, delta), seed=seed)


def _local_gossip(codec, period, seed, workers):
    mixed = gossip.mixing_matrix(gossip.hypercube(workers))
    apart = [np.eye(workers)] * (period - 1)
    return gossip.dpsgd(gossip.cyclic([*apart, mixed]), order="adapt_then_combine")


def _asynchronous(codec, _, rate, workers):
    return events.parameter_server(
        optax.sgd(lambda count: rate(count / workers) / workers), codec=codec
    )


DELAYS, PERIODS = (3, 1, 7), (4, 2, 8)
STRATEGIES = {
    "synchronous": Strategy(lambda codec, _, seed, workers: _mean(codec, seed)),
    "delayed": Strategy(
        lambda codec, delay, seed, workers: jaxcomm.delayed(_mean(codec, seed), delay),
        DELAYS,
        "tau + 1",
    ),
    "local": Strategy(
        lambda codec, period, seed, workers: local_sgd(period, aggregator=_mean(codec, seed)),
        PERIODS,
        "H",
        per_worker=True,
    ),
    "ssp": Strategy(
        lambda codec, staleness, rate, workers: events.stale_synchronous(
            optax.sgd(rate), staleness
        ),
        DELAYS,
        "s + 1",
        is_simulated=True,
    ),
    "asynchronous": Strategy(_asynchronous, stretch=4.0, is_simulated=True),
    "gossip": Strategy(_gossip, [*GRAPHS], "1/gap", stretch=1.0, per_worker=True),
    "gossip_delayed": Strategy(
        lambda codec, delay, seed, workers: gossip.ad_psgd(
            gossip.hypercube(workers), staleness=delay, seed=seed
        ),
        DELAYS,
        "tau + 1",
        per_worker=True,
    ),
    "ad_psgd": Strategy(
        lambda codec, graph, rate, workers: events.asynchronous_pairs(
            optax.sgd(rate), GRAPHS[graph](workers)
        ),
        [*GRAPHS],
        "1/gap",
        stretch=4.0,
        is_simulated=True,
    ),
    "local_gossip": Strategy(_local_gossip, PERIODS, "H", per_worker=True),
}


# The cells.


class Choice(NamedTuple):
    """A cell with one value of its constant."""

    codec: jaxcomm.Codec | None  # With its feedback; None sends exact numbers.
    parameter: Any
    constant: float
    stretch: float  # Those of the strategy and of the codec add up.


class Cell(NamedTuple):
    """A cell of the table: a strategy, a compression, and the paper of the bound."""

    strategy: str
    compression: str | None  # None sends exact numbers.
    source: str

    @property
    def symbol(self) -> str:
        """The name of the constant: of the codec, or else of the strategy."""
        if self.compression is None:
            return STRATEGIES[self.strategy].symbol
        is_unbiased = COMPRESSIONS[self.compression][0].claims.variance is not None
        return NOISE if is_unbiased else "1/delta"

    @property
    def exponent(self) -> float:
        """The predicted exponent of the constant: only unbiased codecs appear in leading terms."""
        return float(self.symbol == NOISE)

    def choices(self, workers: int) -> list[Choice]:
        """The cell with every value of its constant, from the one of the main comparison."""
        strategy = STRATEGIES[self.strategy]
        constants = [constant_at(strategy.symbol, each, workers) for each in strategy.parameters]
        stretches = [strategy.stretch or constant for constant in constants]
        if self.compression is None:
            return [*map(Choice, itertools.repeat(None), strategy.parameters, constants, stretches)]
        # Contractions have feedback; CHOCO-SGD has its own.
        keeps = self.symbol != NOISE and self.strategy != "gossip"
        return [
            Choice(
                error_feedback(codec) if keeps else codec,
                strategy.parameters[0],
                constant_of(codec),
                constant_of(codec) + stretches[0] - 1,
            )
            for codec in COMPRESSIONS[self.compression]
        ]


NOISE = "1 + omega"
ALISTARH = "Alistarh et al. 2017, arXiv 1610.02132, theorem 3.4"
STICH = "Stich, Karimireddy 2019, arXiv 1909.05350, theorem 16"
FEEDBACK = (
    "Stich, Cordonnier, Jaggi 2018, arXiv 1809.07599; Karimireddy et al. 2019, arXiv 1901.09847"
)
UNIFIED = "Koloskova et al. 2020, arXiv 2003.10422, theorem 2"
CHOCO = "Koloskova, Stich, Jaggi 2019, arXiv 1902.00340, theorem 4"
LIAN = "Lian et al. 2015, arXiv 1506.08272, theorem 1"
AD_PSGD = "Lian et al. 2018, arXiv 1710.06952, theorem 1"
OF_CODEC = ", with the variance of the codec"

CELLS = {
    "exact mean": Cell(
        "synchronous", None, "Bottou, Curtis, Nocedal 2018, arXiv 1606.04838, theorem 4.7"
    ),
    "dither": Cell("synchronous", "dither", ALISTARH),
    "random-k": Cell("synchronous", "random_k", ALISTARH),
    "dither, feedback": Cell("synchronous", "ef_dither", FEEDBACK),
    "top-k, feedback": Cell("synchronous", "ef_top_k", FEEDBACK),
    "delayed": Cell("delayed", None, STICH),
    "delayed, dither": Cell("delayed", "dither", STICH + OF_CODEC),
    "delayed, top-k, feedback": Cell("delayed", "ef_top_k", STICH),
    "local": Cell("local", None, "Stich 2018, arXiv 1805.09767, theorem 2.2"),
    "local, dither": Cell("local", "dither", "Reisizadeh et al. 2020, arXiv 1909.13014, theorem 1"),
    "local, top-k, feedback": Cell(
        "local", "ef_top_k", "Basu et al. 2019, arXiv 1906.02367, theorem 3"
    ),
    "SSP": Cell("ssp", None, "Ho et al. 2013 (SSP); Stich, Karimireddy 2019, arXiv 1909.05350"),
    "asynchronous": Cell("asynchronous", None, LIAN),
    "asynchronous, dither": Cell("asynchronous", "dither", LIAN + OF_CODEC),
    "asynchronous, top-k, feedback": Cell("asynchronous", "ef_top_k", STICH),
    "D-PSGD": Cell("gossip", None, UNIFIED),
    "CHOCO, dither": Cell("gossip", "ef_dither", CHOCO),
    "CHOCO, top-k": Cell("gossip", "ef_top_k", CHOCO),
    "AD-PSGD, in step": Cell("gossip_delayed", None, AD_PSGD),
    "AD-PSGD": Cell("ad_psgd", None, AD_PSGD),
    "D-PSGD every H steps": Cell("local_gossip", None, UNIFIED),
}
