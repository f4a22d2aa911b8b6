"""Statistics of a study: spreads, intervals, comparisons paired by seed, and Holm's correction.

A run that diverged has no finite value. It counts as worse than every finite run.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scipy.special import stdtr, stdtrit

BySeed = Mapping[int, float]


def mean(values: Sequence[float]) -> float:
    """The mean; NaN without values or if a value is NaN."""
    return statistics.mean(values) if values else math.nan


def sd(values: Sequence[float]) -> float:
    """The standard deviation of a sample; NaN for fewer than two or non-finite values."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values)


def t_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """The confidence interval of the mean by Student's t-distribution.

    It is NaN for fewer than two values or if a value is not finite.

    Example:
      >>> low, high = t_interval([1.0, 2.0, 3.0])
      >>> round(low, 2), round(high, 2)
      (-0.48, 4.48)
    """
    count = len(values)
    half = float(stdtrit(count - 1, (1 + level) / 2)) * sd(values) / math.sqrt(count or 1)
    return mean(values) - half, mean(values) + half


class Difference(NamedTuple):
    """The mean over seeds of the difference of a method from a reference.

    The mean is infinite if only one of the two diverged with some seed. `low` and `high` are the
    ends of its confidence interval, and `error` is its standard error.
    """

    mean: float
    low: float
    high: float
    error: float
    pairs: int

    def p_above(self, limit: float = 0.0) -> float:
        """The p-value of the one-sided t-test that the difference is above a limit."""
        if math.isinf(self.mean) and self.pairs > 1:  # By convention, of every limit.
            return 0.0 if self.mean > 0 else 1.0
        if math.isnan(self.error):
            return math.nan
        if self.error == 0:
            return 0.0 if self.mean > limit else 1.0
        return float(stdtr(self.pairs - 1, (limit - self.mean) / self.error))

    def p_below(self, limit: float = 0.0) -> float:
        """The p-value of the one-sided t-test that the difference is below a limit."""
        return self._replace(mean=-self.mean).p_above(-limit)

    @property
    def ratio(self) -> tuple[float, float, float]:
        """The geometric mean ratio and its interval, from a difference of logarithms."""
        return tuple(math.inf if each > 700 else math.exp(each) for each in self[:3])


def paired_difference(
    values: BySeed, reference: BySeed, *, log: bool = False, level: float = 0.95
) -> Difference:
    """The difference `values - reference`, paired by seed; lower values are better.

    Only common seeds count. If one of the two diverged with some seed, the difference is infinite.
    If each of the two diverged where the other did not, it is NaN. Seeds with which both diverged
    are excluded. With `log` it is of natural logarithms, and NaN if a value is 0 or negative.

    Example:
      >>> difference = paired_difference({0: 1.1, 1: 1.3, 2: 1.2}, {0: 1.0, 1: 1.1, 2: 1.1})
      >>> round(difference.mean, 3), round(difference.p_above(), 3), difference.pairs
      (0.133, 0.029, 3)
      >>> round(paired_difference({0: 2.0, 1: 4.2}, {0: 1.0, 1: 2.0}, log=True).ratio[0], 3)
      2.049
    """
    if log:
        if any(value <= 0 for value in (*values.values(), *reference.values())):
            return Difference(*[math.nan] * 4, len(values.keys() & reference.keys()))
        logs = [{n: math.log(x) for n, x in each.items()} for each in (values, reference)]
        return paired_difference(*logs, level=level)
    both = [(values[seed], reference[seed]) for seed in values if seed in reference]
    pairs = [[each if math.isfinite(each) else math.inf for each in pair] for pair in both]
    differences = [a - b for a, b in pairs if math.isfinite(a) or math.isfinite(b)]
    center, count = mean(differences), len(differences)
    low, high = t_interval(differences, level)
    if math.isinf(center) and count > 1:
        low = high = center
    return Difference(center, low, high, sd(differences) / math.sqrt(count or 1), count)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values of several tests, adjusted so that one error in all of them is as unlikely.

    Holm (1979): the i-th smallest of m is multiplied by m - i + 1, and is at least the one before.
    Those that are NaN are not tests.

    Example:
      >>> holm([0.01, 0.04, 0.03])
      [0.03, 0.06, 0.06]
    """
    tests = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    adjusted, least = [math.nan] * len(p_values), 0.0
    for rank, (p, place) in enumerate(tests):
        least = max(least, min(1.0, (len(tests) - rank) * p))
        adjusted[place] = least
    return adjusted
