"""Fitted exponents of several seeds, compared with the exponent that a bound predicts."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from experiments.study.statistics import confidence_interval, mean

Verdict = Literal["agreed", "not told apart", "refuted", "diverged", "-"]


class Comparison(NamedTuple):
    """A fitted exponent and a predicted one.

    Attributes:
      exponent: The mean over seeds.
      low: The lower end of the 95 % interval.
      high: The upper end.
      predicted: The exponent of the bound.
      verdict: `"agreed"` if the interval is within a margin around the prediction, `"refuted"` if
        it is outside, `"not told apart"` otherwise.
    """

    exponent: float
    low: float
    high: float
    predicted: float
    verdict: Verdict


def compare(exponents: Sequence[float], predicted: float, margin: float) -> Comparison:
    """Compares the exponents of seeds with a prediction.

    Example:
      >>> compare([-1.02, -0.98, -1.0], -1.0, 0.15).verdict
      'agreed'
      >>> compare([-0.5, -0.52, -0.48], -1.0, 0.15).verdict
      'refuted'
    """
    center, (low, high) = mean(exponents), confidence_interval(exponents)
    verdict: Verdict = "not told apart"
    if math.isnan(predicted) or math.isnan(center):
        verdict = "-"
    elif math.isinf(center):
        verdict = "diverged"
    elif predicted - margin <= low and high <= predicted + margin:
        verdict = "agreed"
    elif high < predicted - margin or low > predicted + margin:
        verdict = "refuted"
    return Comparison(center, low, high, predicted, verdict)
