"""The cells of the study of convergence: strategies x compressions, with the bounds of papers."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jaxcomm
from experiments.methods.strategies import COMPRESSIONS, STRATEGIES, Compression, Strategy
from jaxcomm.compression.feedback import error_feedback

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


LOCAL_NOISE = (
    "The codec rounds a displacement of H steps, whose squared norm is of the order of H² ζ² + H "
    "σ². So its noise enters as 1 + ω (1 + H ζ²/σ²), and workers differ (ζ > 0)."
)
RESIDUAL = (
    "The residual holds displacements of H steps of workers that differ. Its squared norm, of the "
    "order of H² ζ²/δ², enters the second term of the bound, of the order of 1/T². With the "
    "coarsest codec, that term is not small in a run."
)
DISAGREEMENT = (
    "Workers that differ disagree, by a squared distance of the order of 1/T², whatever n is. This "
    "second term of the bound is not small at the beginning of the fit, so the error falls faster "
    "until it has vanished."
)
FIRST_STEPS = (
    "No gradient is applied in the first τ steps, and then τ steps have the first gradient. This "
    "adds the second term of the bound, of the order of τ/T. It is not small in the shortest run."
)

REASONS: Mapping[tuple[str, str, str, bool], str] = {
    ("quadratic", "local, dither", "constant", True): LOCAL_NOISE,
    ("quadratic", "local, top-k, feedback", "constant", True): RESIDUAL,
    ("logistic", "CHOCO, dither", "steps", False): DISAGREEMENT,
    ("logistic", "CHOCO, top-k", "steps", False): DISAGREEMENT,
    ("logistic", "AD-PSGD, in step", "steps", False): DISAGREEMENT,
    ("logistic", "D-PSGD every H steps", "steps", False): DISAGREEMENT,
    ("constant rate", "delayed", "steps", False): FIRST_STEPS,
    ("constant rate", "AD-PSGD, in step", "steps", False): FIRST_STEPS,
}
"""Why cells do not agree: problem, cell, quantity, and whether the error falls more slowly."""


def reason(problem: str, cell: str, quantity: str, is_slower: bool) -> str:
    """Why a cell does not agree, as far as it is known."""
    return REASONS.get((problem, cell, quantity, is_slower), "Not explained.")
