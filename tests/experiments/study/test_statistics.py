"""Statistics of a study, against SciPy's tests and values computed by hand."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from experiments.study.equivalence import equivalence
from experiments.study.statistics import (
    confidence_interval,
    mean,
    paired_difference,
    paired_log_ratio,
    sd,
    verdict,
)

NAN, INF = math.nan, math.inf
NUMBERS = st.floats(-1e3, 1e3).map(lambda x: round(x, 3))
PAIRS = st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=8)


def by_seed(values: list[float]) -> dict[int, float]:
    return dict(enumerate(values))


def split(pairs: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """The pairs as two lists; their differences are not constant."""
    a, b = (list(each) for each in zip(*pairs, strict=True))
    assume(np.ptp(np.subtract(a, b)) > 1e-2)
    return a, b


def test_the_interval_of_three_values_is_that_of_a_table_of_t() -> None:
    interval = confidence_interval([1.0, 2.0, 3.0])  # t of 2 degrees at 0.975 is 4.3027.
    t = 4.3027 / math.sqrt(3)
    assert interval == pytest.approx((2 - t, 2 + t), abs=1e-4)
    assert sd([1.0, 3.0]) == math.sqrt(2) and mean([1.0, 2.0]) == 1.5
    few = sd([1.0]), sd([1.0, NAN]), sd([1.0, INF]), mean([]), *confidence_interval([1.0, NAN])
    assert all(map(math.isnan, few))


@settings(deadline=None)
@given(PAIRS, st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_paired_differences_equal_those_of_scipy(
    pairs: list[tuple[float, float]], level: float
) -> None:
    a, b = split(pairs)
    difference = paired_difference(by_seed(a), by_seed(b), level=level)
    two_sided = stats.ttest_rel(a, b)
    interval = two_sided.confidence_interval(level)
    np.testing.assert_allclose(difference.mean, np.mean(np.subtract(a, b)), atol=1e-9)
    np.testing.assert_allclose(difference[1:3], interval, rtol=1e-7, atol=1e-7)
    np.testing.assert_allclose(difference.p_value, two_sided.pvalue, rtol=1e-7)
    for alternative in ("greater", "less"):
        expected = stats.ttest_rel(a, b, alternative=alternative).pvalue
        computed = getattr(difference, f"p_{alternative}")
        np.testing.assert_allclose(computed, expected, rtol=1e-7, atol=1e-12)
    assert difference.pairs == len(pairs)


@settings(deadline=None)
@given(PAIRS, st.floats(0.1, 500))
def test_equivalence_is_two_one_sided_tests(
    pairs: list[tuple[float, float]], margin: float
) -> None:
    a, b = split(pairs)
    result = equivalence(by_seed(a), by_seed(b), margin)
    differences = np.subtract(a, b)
    above = stats.ttest_1samp(differences, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, margin, alternative="less").pvalue
    np.testing.assert_allclose(result.p_value, max(above, below), rtol=1e-6, atol=1e-12)
    assert result.is_equivalent == (max(above, below) < 0.05)
    other_side = max(
        stats.ttest_1samp(differences, margin, alternative="greater").pvalue < 0.05,
        stats.ttest_1samp(differences, -margin, alternative="less").pvalue < 0.05,
    )
    assert result.is_different == other_side


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)), min_size=2, max_size=6))
def test_log_ratios_are_differences_of_logarithms(pairs: list[tuple[float, float]]) -> None:
    a, b = (np.array(each) for each in zip(*pairs, strict=True))
    assume(np.ptp(np.log(a / b)) > 1e-2)
    difference = paired_log_ratio(by_seed(list(a)), by_seed(list(b)))
    expected = stats.ttest_1samp(np.log(a / b), 0, alternative="greater").pvalue
    np.testing.assert_allclose(difference.p_greater, expected, rtol=1e-6)
    np.testing.assert_allclose(difference.ratio[0], stats.gmean(a / b), rtol=1e-9)
    assert difference.ratio[1] < difference.ratio[0] < difference.ratio[2]


def test_only_common_seeds_are_paired() -> None:
    difference = paired_difference({0: 1.0, 1: 2.0, 2: 9.0}, {1: 1.5, 0: 0.0, 7: 100.0})
    assert (difference.mean, difference.pairs) == (0.75, 2)
    one = paired_difference({0: 1.0}, {0: 3.0})
    assert one.mean == -2 and one.pairs == 1 and math.isnan(one.p_value)
    assert verdict(one) == "not told apart"
    none = paired_difference({0: 1.0}, {})
    assert math.isnan(none.mean) and none.pairs == 0


@pytest.mark.parametrize("diverged", [NAN, -INF])
@pytest.mark.parametrize("lower_is_better", [True, False])
def test_a_diverged_run_is_the_worst(diverged: float, lower_is_better: bool) -> None:
    finite, partly = {0: 1.0, 1: 2.0, 2: 3.0}, {0: 0.5, 1: diverged, 2: 0.6}
    options = {"lower_is_better": lower_is_better}
    worse = paired_difference(partly, finite, **options)
    assert worse.mean == (INF if lower_is_better else -INF)
    assert verdict(worse, **options) == "worse"
    better = paired_difference(finite, partly, **options)
    assert verdict(better, **options) == "better"
    assert verdict(worse, **options, one_sided="better") == "not told apart"


def test_runs_that_both_diverge_are_not_told_apart() -> None:
    crossed = paired_difference({0: NAN, 1: 1.0, 2: 1.0}, {0: 1.0, 1: NAN, 2: 1.0})
    assert math.isnan(crossed.mean) and verdict(crossed) == "not told apart"
    both = paired_difference({0: NAN, 1: 1.0, 2: 2.0}, {0: NAN, 1: 0.5, 2: 1.0})
    assert (both.mean, both.pairs) == (0.75, 2)


@pytest.mark.parametrize(
    ("shift", "p_values"), [(0.0, (1, 1, 1)), (1.0, (0, 0, 1)), (-1.0, (0, 1, 0))]
)
def test_a_constant_difference_needs_no_test(shift: float, p_values: tuple) -> None:
    found = paired_difference(by_seed([1.0 + shift, 2.0 + shift]), by_seed([1.0, 2.0]))
    assert (found.p_value, found.p_greater, found.p_less) == p_values


def test_losses_of_zero_have_no_ratio() -> None:
    assert math.isnan(paired_log_ratio({0: 0.0, 1: 1.0}, {0: 1.0, 1: 2.0}).mean)
    assert math.isnan(paired_log_ratio({0: NAN, 1: -1.0}, {0: 1.0, 1: 2.0}).mean)
    wide = paired_log_ratio({0: 1e30, 1: 1e-30}, {0: 1.0, 1: 1.0}, level=0.99)
    assert wide.ratio[1:] == (0, INF)


@pytest.mark.parametrize(
    ("lower_is_better", "one_sided", "expected"),
    [
        (True, None, "better"),
        (True, "better", "better"),
        (True, "worse", "not told apart"),
        (False, None, "worse"),
        (False, "worse", "worse"),
        (False, "better", "not told apart"),
    ],
)
def test_a_one_sided_claim_checks_the_sign(
    lower_is_better: bool, one_sided: Any, expected: str
) -> None:
    lower = paired_difference(by_seed([1.0, 1.1, 0.9]), by_seed([2.0, 2.2, 2.0]))
    assert verdict(lower, lower_is_better=lower_is_better, one_sided=one_sided) == expected


def test_one_side_needs_half_the_evidence_and_no_level_turns_a_sign_around() -> None:
    difference = paired_difference(by_seed([1.0, 2.0, 3.0]), by_seed([0.0, 0.4, 2.4]))
    assert 0.05 < difference.p_value < 0.1
    assert verdict(difference) == "not told apart"
    assert verdict(difference, one_sided="worse") == "worse"
    slightly_lower = paired_difference(by_seed([1.0, 2.0, 2.9]), by_seed([1.1, 1.9, 3.0]))
    assert slightly_lower.mean < 0 and slightly_lower.p_greater < 0.9
    assert verdict(slightly_lower, significance=0.9, one_sided="worse") == "not told apart"


def test_equivalence_is_undecided_without_data_and_false_for_divergence() -> None:
    few = equivalence({0: 1.0}, {0: 1.0}, 0.1)
    assert not few.is_equivalent and not few.is_different and math.isnan(few.p_value)
    diverged = equivalence({0: 1.0, 1: NAN}, {0: 1.0, 1: 1.0}, 0.1)
    assert not diverged.is_equivalent and diverged.is_different
    log = equivalence(by_seed([110.0, 111.0]), by_seed([100.0, 100.0]), 0.2, log=True)
    assert log.is_equivalent and log.difference.mean == pytest.approx(math.log(1.105), abs=1e-3)


def test_impossible_levels_are_errors() -> None:
    with pytest.raises(ValueError, match="level must be above 0 and below 1"):
        paired_difference({}, {}, level=95)
