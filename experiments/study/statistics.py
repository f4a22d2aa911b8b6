"""Statistics of a study: spreads, confidence intervals, and comparisons paired by seed.

A run that diverged has no finite value. It counts as worse than every finite run.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from scipy.special import stdtr, stdtrit

Verdict = Literal["better", "worse", "not told apart"]


def mean(values: Sequence[float]) -> float:
    """The mean; NaN without values or if a value is NaN."""
    return statistics.mean(values) if values else math.nan


def sd(values: Sequence[float]) -> float:
    """The standard deviation of a sample; NaN for fewer than two or non-finite values."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values)


class Interval(NamedTuple):
    """The ends of a confidence interval."""

    low: float
    high: float


def confidence_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """The confidence interval of the mean by Student's t-distribution.

    It is NaN for fewer than two values or if a value is not finite.

    Example:
      >>> low, high = confidence_interval([1.0, 2.0, 3.0])
      >>> round(low, 2), round(high, 2)
      (-0.48, 4.48)
    """
    check_fraction("level", level)
    deviation = sd(values)
    if math.isnan(deviation):
        return Interval(math.nan, math.nan)
    center, error = mean(values), deviation / math.sqrt(len(values))
    half = float(stdtrit(len(values) - 1, (1 + level) / 2)) * error
    return Interval(center - half, center + half)


class Difference(NamedTuple):
    """The mean over seeds of the difference of a method from a reference.

    Attributes:
      mean: The mean; infinite if only one of the two diverged with some seed.
      low: The lower end of the confidence interval of the mean.
      high: The upper end.
      p_value: The p-value of the two-sided paired t-test.
      p_greater: The p-value of the one-sided test that the difference is above 0.
      pairs: The number of seeds.
    """

    mean: float
    low: float
    high: float
    p_value: float
    p_greater: float
    pairs: int

    @property
    def p_less(self) -> float:
        """The p-value of the one-sided test that the difference is below 0."""
        if self.mean < 0:
            return self.p_value / 2
        return 1 - self.p_greater if self.mean > 0 else self.p_greater

    @property
    def ratio(self) -> tuple[float, float, float]:
        """The geometric mean ratio and its interval, from a difference of logarithms."""
        return _exp(self.mean), _exp(self.low), _exp(self.high)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def check_fraction(name: str, value: float) -> None:
    """Raises a ValueError unless the value is above 0 and below 1."""
    if not 0 < value < 1:
        raise ValueError(f"{name} must be above 0 and below 1, got {value}.")


def p_greater_of(center: float, error: float, pairs: int) -> float:
    """The p-value of the one-sided t-test; `error` is the standard error of the mean."""
    if error == 0:
        return 0.0 if center > 0 else 1.0
    return float(stdtr(pairs - 1, -center / error))


def _differences(
    values: Mapping[int, float], reference: Mapping[int, float], lower_is_better: bool
) -> list[float]:
    """One difference per common seed, except for seeds with which both runs diverged."""
    worst = math.inf if lower_is_better else -math.inf
    pairs = [
        [each if math.isfinite(each) else worst for each in (values[seed], reference[seed])]
        for seed in values
        if seed in reference
    ]
    return [a - b for a, b in pairs if math.isfinite(a) or math.isfinite(b)]


def _summarize(differences: Sequence[float], level: float) -> Difference:
    check_fraction("level", level)
    pairs, nan = len(differences), math.nan
    center = mean(differences)
    if math.isinf(center) and pairs > 1:
        p_greater = 0.0 if center > 0 else 1.0
        return Difference(center, center, center, 0.0, p_greater, pairs)
    if pairs < 2 or math.isnan(center):
        return Difference(center, nan, nan, nan, nan, pairs)
    low, high = confidence_interval(differences, level)
    error = sd(differences) / math.sqrt(pairs)
    p_greater = p_greater_of(center, error, pairs)
    p_value = min(1.0, 2 * min(p_greater, p_greater_of(-center, error, pairs)))
    return Difference(center, low, high, p_value, p_greater, pairs)


def paired_difference(
    values: Mapping[int, float],
    reference: Mapping[int, float],
    *,
    level: float = 0.95,
    lower_is_better: bool = True,
) -> Difference:
    """The difference `values - reference`, paired by seed.

    Only common seeds count. If one of the two diverged with some seed, the difference is infinite
    and its p-value is 0 by convention. If each of the two diverged where the other did not, it is
    NaN. Seeds with which both diverged are excluded.

    Args:
      values: The value per seed of the method.
      reference: The value per seed of the reference.
      level: The level of the confidence interval.
      lower_is_better: Whether a diverged run counts as infinite rather than as minus infinity.

    Example:
      >>> difference = paired_difference({0: 1.1, 1: 1.3, 2: 1.2}, {0: 1.0, 1: 1.1, 2: 1.1})
      >>> round(difference.mean, 3), round(difference.p_value, 3), difference.pairs
      (0.133, 0.057, 3)
    """
    return _summarize(_differences(values, reference, lower_is_better), level)


def paired_log_ratio(
    values: Mapping[int, float], reference: Mapping[int, float], *, level: float = 0.95
) -> Difference:
    """The difference of the natural logarithms, paired by seed, for positive values.

    It is NaN if a value is 0 or negative. `Difference.ratio` has the ratio and its interval.

    Example:
      >>> difference = paired_log_ratio({0: 2.0, 1: 4.2}, {0: 1.0, 1: 2.0})
      >>> round(difference.ratio[0], 3)
      2.049
    """
    if any(value <= 0 for value in (*values.values(), *reference.values())):
        return _summarize([math.nan] * len(values.keys() & reference.keys()), level)
    logarithms = [
        {seed: math.log(value) for seed, value in each.items()} for each in (values, reference)
    ]
    return _summarize(_differences(*logarithms, lower_is_better=True), level)


def verdict(
    difference: Difference,
    *,
    significance: float = 0.05,
    lower_is_better: bool = True,
    one_sided: Literal["better", "worse"] | None = None,
) -> Verdict:
    """What a difference from the reference shows.

    A two-sided test shows that a method is better or worse. A one-sided test looks for only one of
    the two, so a significant difference of the other sign is `"not told apart"`.

    Example:
      >>> lower = paired_difference({0: 1.0, 1: 1.1, 2: 0.9}, {0: 2.0, 1: 2.2, 2: 2.0})
      >>> verdict(lower), verdict(lower, one_sided="worse")
      ('better', 'not told apart')
    """
    check_fraction("significance", significance)
    direction: Verdict = "better" if (difference.mean < 0) == lower_is_better else "worse"
    if one_sided is None:
        return direction if difference.p_value < significance else "not told apart"
    looks_below = (one_sided == "better") == lower_is_better
    p_value = difference.p_less if looks_below else difference.p_greater
    if direction == one_sided and p_value < significance:
        return one_sided
    return "not told apart"
