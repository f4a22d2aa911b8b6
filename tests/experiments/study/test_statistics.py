"""Statistics of a study, against SciPy's tests and Holm's definition."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from experiments.study.statistics import holm, paired_difference, sd

NAN, INF = math.nan, math.inf
PAIRS = st.lists(st.tuples(*[st.floats(0.01, 100)] * 2), min_size=2, max_size=8)


@settings(deadline=None, max_examples=40)
@given(PAIRS, st.sampled_from([0.5, 0.9, 0.95, 0.99]), st.floats(0.1, 50), st.booleans())
def test_paired_tests_equal_those_of_scipy(
    pairs: list[tuple[float, float]], level: float, margin: float, log: bool
) -> None:
    """One-sided and, of both sides of a margin, of equivalence (TOST)."""
    a, b = np.log(np.transpose(pairs)) if log else np.transpose(pairs)
    assume(np.ptp(a - b) > 1e-2)
    of_seeds = [dict(enumerate(each)) for each in np.transpose(pairs).tolist()]
    found = paired_difference(*of_seeds, log=log, level=level)
    interval = stats.ttest_1samp(a - b, 0).confidence_interval(level)
    np.testing.assert_allclose(found[:3], ((a - b).mean(), *interval), rtol=1e-6, atol=1e-9)
    assert found.pairs == len(pairs)
    for limit in (0, margin, -margin):
        for p, side in ((found.p_above, "greater"), (found.p_below, "less")):
            of_scipy = stats.ttest_1samp(a - b, limit, alternative=side).pvalue
            np.testing.assert_allclose(p(limit), of_scipy, rtol=1e-6, atol=1e-12)
    if log:
        np.testing.assert_allclose(found.ratio[0], stats.gmean(np.divide(*np.transpose(pairs))))


@given(st.lists(st.floats(0, 1) | st.just(NAN), max_size=8))
def test_holm_rejects_step_down(p_values: list[float]) -> None:
    """Until the first of the sorted p-values above level / (tests left)."""
    adjusted, tests = holm(p_values), sorted(p for p in p_values if not math.isnan(p))
    for level in (0.01, 0.05, 0.3, 0.999):
        stop = [p for n, p in enumerate(tests) if p * (len(tests) - n) > level]
        assert [each <= level for each in adjusted] == [
            p < min(stop, default=INF) for p in p_values
        ]


def test_only_common_seeds_are_paired_and_few_have_no_test() -> None:
    found = paired_difference({0: 1.0, 1: 2.0, 2: 9.0}, {1: 1.5, 0: 0.0, 7: 100.0})
    assert (found.mean, found.pairs) == (0.75, 2)
    one, none = paired_difference({0: 1.0}, {0: 3.0}), paired_difference({0: 1.0}, {})
    assert (one.mean, one.pairs, none.pairs) == (-2, 1, 0)
    of_one, of_zero = (
        paired_difference({0: each}, {0: 1.0}, log=True).ratio for each in (2.0, 0.0)
    )
    assert of_one[0] == pytest.approx(2)
    tests = (test() for each in (one, none) for test in (each.p_above, each.p_below))
    undecided = *tests, none.mean, *of_one[1:], *of_zero, sd([1.0]), sd([1, INF])
    assert all(map(math.isnan, undecided))


@pytest.mark.parametrize("diverged", [NAN, -INF, INF])
def test_a_diverged_run_is_the_worst(diverged: float) -> None:
    finite, partly = {0: 1.0, 1: 2.0, 2: 3.0}, {0: 0.5, 1: diverged, 2: 0.6}
    worse, better = paired_difference(partly, finite), paired_difference(finite, partly)
    assert worse[:3] == (INF,) * 3 and better[:3] == (-INF,) * 3
    assert worse.p_above(99) == better.p_below(-99) == 0
    assert worse.p_below(99) == better.p_above(-99) == 1
    crossed = paired_difference({0: NAN, 1: 1.0, 2: 1.0}, {0: 1.0, 1: NAN, 2: 1.0})
    assert all(map(math.isnan, (crossed.mean, crossed.p_above(), crossed.p_below())))
    both = paired_difference({0: NAN, 1: 1.0, 2: 2.0}, {0: NAN, 1: 0.5, 2: 1.0})
    assert (both.mean, both.pairs) == (0.75, 2)


@pytest.mark.parametrize(("shift", "p"), [(0.0, (1, 1)), (1.0, (0, 1)), (-1.0, (1, 0))])
def test_a_constant_difference_needs_no_test(shift: float, p: tuple[int, ...]) -> None:
    found = paired_difference({0: 1.0 + shift, 1: 2.0 + shift}, {0: 1.0, 1: 2.0})
    assert (found.p_above(), found.p_below()) == p
