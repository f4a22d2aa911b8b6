"""Tests of equivalence."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from scipy.special import stdtrit

from experiments.study.statistics import (
    Difference,
    check_fraction,
    p_greater_of,
    paired_difference,
    paired_log_ratio,
)


class Equivalence(NamedTuple):
    """The result of two one-sided tests.

    Attributes:
      difference: The difference, with the interval of the test, `1 - 2 * significance`.
      margin: The largest absolute difference that counts as equivalent.
      p_value: The larger of the two p-values.
      is_equivalent: Whether the absolute difference is significantly below the margin.
      is_different: Whether it is significantly above the margin.
    """

    difference: Difference
    margin: float
    p_value: float
    is_equivalent: bool
    is_different: bool


def equivalence(
    values: Mapping[int, float],
    reference: Mapping[int, float],
    margin: float,
    *,
    significance: float = 0.05,
    log: bool = False,
) -> Equivalence:
    """Tests whether the mean difference is within `margin` (two one-sided tests, TOST).

    Args:
      values: The value per seed of the method; lower is better.
      reference: The value per seed of the reference.
      margin: The margin, stated before the run; of the logarithms if `log`.
      significance: The level of each of the two tests.
      log: Whether to test the difference of the logarithms.

    Raises:
      ValueError: If the margin is not above 0.

    Example:
      >>> equivalence({0: 1.01, 1: 0.99, 2: 1.0}, {0: 1.0, 1: 1.0, 2: 1.0}, 0.1).is_equivalent
      True
    """
    if not margin > 0:
        raise ValueError(f"margin must be above 0, got {margin}.")
    check_fraction("significance", 2 * significance)
    compare = paired_log_ratio if log else paired_difference
    difference = compare(values, reference, level=1 - 2 * significance)
    center, low, high, *_, pairs = difference
    if math.isnan(low):
        return Equivalence(difference, margin, math.nan, False, False)
    if math.isinf(center):
        return Equivalence(difference, margin, 1.0, False, True)
    half = (high - low) / 2
    error = half / float(stdtrit(pairs - 1, 1 - significance))
    p_value = max(
        p_greater_of(center + margin, error, pairs), p_greater_of(margin - center, error, pairs)
    )
    is_different = low > margin or high < -margin
    return Equivalence(difference, margin, p_value, p_value < significance, is_different)
