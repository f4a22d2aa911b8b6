"""Tests of claims in every setting of a table: better, no worse, equivalent, below a limit."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from experiments.study.claims import Finding, Judge, Outcome, Results
from experiments.study.equivalence import equivalence
from experiments.study.statistics import (
    Difference,
    paired_difference,
    paired_log_ratio,
    verdict,
)


def _number(value: float, digits: int = 3) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}g}"


def _p(value: float) -> str:
    return "p < 0.0001" if value < 1e-4 else f"p = {_number(value)}"


def _describe(difference: Difference, log: bool, confidence: str) -> str:
    numbers = difference.ratio if log else difference[:3]
    mean, low, high = (_number(each, 4 if log else 3) for each in numbers)  # Ratios are close to 1.
    return (
        f"{'ratio' if log else 'difference'} {mean} ({confidence} % interval {low} to {high}, "
        f"{_p(difference.p_value)}, {difference.pairs} seeds)"
    )


def _is_about(keys: Mapping[str, Any], methods: Mapping[str, Any]) -> bool:
    """Whether a group has the keys `methods`; a tuple has several values of a key."""
    return all(
        keys[name] in (wanted if isinstance(wanted, tuple) else (wanted,))
        for name, wanted in methods.items()
    )


def _judge_pairs(
    measure: str,
    methods: Mapping[str, Any],
    judge: Callable[[Mapping[int, float], Mapping[int, float]], tuple[Outcome, str]],
    reference: Mapping[str, Any] | None = None,
) -> Judge:
    """Compares groups with the keys `methods` with their references, in every setting of both."""

    def findings(results: Results) -> list[Finding]:
        found = []
        for line in results.lines:
            group = line.group if reference is None else line.group.compared_with(reference)
            if group.is_reference or not _is_about(group.keys, methods):
                continue
            other = group.reference
            if other is None:
                found.append(Finding(line.where, "not tested", "there is no reference"))
                continue
            outcome, numbers = judge(group.by_seed(measure), other.by_seed(measure))
            found.append(Finding(line.where, outcome, f"{measure} {numbers}"))
        return found

    return findings


def _compare(values: Mapping, reference: Mapping, log: bool, lower_is_better: bool) -> Difference:
    if log:
        return paired_log_ratio(values, reference)
    return paired_difference(values, reference, lower_is_better=lower_is_better)


def _one_sided(difference: Difference, significance: float, lower_is_better: bool) -> Outcome:
    """Whether one of the two one-sided tests is significant."""
    sides: dict[Any, Outcome] = {"better": "holds", "worse": "does not hold"}
    for side, outcome in sides.items():
        options = {"significance": significance, "lower_is_better": lower_is_better}
        if verdict(difference, one_sided=side, **options) == side:
            return outcome
    return "not tested" if difference.pairs < 2 else "not told apart"


def _check_margin(margin: float, least: int = 0) -> None:
    if not margin > least:
        of = " for a ratio" if least else ""
        raise ValueError(f"The margin must be above {least}{of}, got {margin}.")


def is_better(
    measure: str,
    *,
    methods: Mapping[str, Any] | None = None,
    reference: Mapping[str, Any] | None = None,
    log: bool = False,
    lower_is_better: bool = True,
    significance: float = 0.05,
) -> Judge:
    """The claim that methods are better than the reference of the table, with paired seeds.

    It holds if a one-sided test shows that the method is better. It does not hold if a one-sided
    test shows that it is worse. Otherwise the two are not told apart.

    Args:
      measure: The column of the runs.
      methods: The keys of the groups that are claimed to be better, such as
        `{"method": ("matcha", "sgp")}`; all by default.
      reference: The keys of the groups than which they are better; those of the table by default.
      log: Whether to compare ratios, for positive values.
      lower_is_better: Whether lower values are better; ratios require it.
      significance: The level of each test.
    """

    if log and not lower_is_better:
        raise ValueError("A claim about ratios is about values of which lower ones are better.")

    def judge(values: Mapping, reference: Mapping) -> tuple[Outcome, str]:
        difference = _compare(values, reference, log, lower_is_better)
        numbers = _describe(difference, log, "95")
        return _one_sided(difference, significance, lower_is_better), numbers

    return _judge_pairs(measure, methods or {}, judge, reference)


def is_no_worse(
    measure: str,
    margin: float,
    *,
    methods: Mapping[str, Any] | None = None,
    reference: Mapping[str, Any] | None = None,
    log: bool = False,
    significance: float = 0.05,
) -> Judge:
    """The claim that methods are better than the reference of the table, or worse by a margin.

    It holds if a one-sided test shows that the difference is below the margin. It does not hold if
    one shows that it is above. Otherwise the two are not told apart.

    Args:
      measure: The column of the runs; lower is better.
      margin: The margin; for ratios the largest ratio, such as 1.1 for 10 % more or 0.5 for half.
      methods: The keys of the groups that are claimed to be no worse; all by default.
      reference: The keys of the groups than which they are no worse; those of the table by default.
      log: Whether to compare ratios, for positive values.
      significance: The level of each test.
    """
    _check_margin(margin)

    def judge(values: Mapping, reference: Mapping) -> tuple[Outcome, str]:
        limits = {seed: each * margin if log else each + margin for seed, each in reference.items()}
        outcome = _one_sided(_compare(values, limits, log, True), significance, True)
        numbers = _describe(_compare(values, reference, log, True), log, "95")
        return outcome, f"{numbers}, margin {margin:g}"

    return _judge_pairs(measure, methods or {}, judge, reference)


def is_equivalent(
    measure: str,
    margin: float,
    *,
    methods: Mapping[str, Any] | None = None,
    reference: Mapping[str, Any] | None = None,
    log: bool = False,
    significance: float = 0.05,
) -> Judge:
    """The claim that methods are as good as the reference of the table, up to a margin.

    It holds if two one-sided tests show that the difference is within the margin. It does not hold
    if they show that the difference is outside. Otherwise the two are not told apart.

    Args:
      measure: The column of the runs; lower is better.
      margin: The margin; for ratios the largest ratio, such as 1.1 for 10 %.
      methods: The keys of the groups that are claimed to be equivalent; all by default.
      reference: The keys of the groups to which they are equivalent; those of the table by default.
      log: Whether to compare ratios, for positive values.
      significance: The level of each test.
    """
    _check_margin(margin, 1 if log else 0)

    def judge(values: Mapping, reference: Mapping) -> tuple[Outcome, str]:
        limit = math.log(margin) if log else margin
        test = equivalence(values, reference, limit, significance=significance, log=log)
        numbers = _describe(test.difference, log, f"{100 * (1 - 2 * significance):g}")
        numbers += f", margin {margin:g}, equivalence {_p(test.p_value)}"
        if test.is_equivalent:
            return "holds", numbers
        if test.is_different:
            return "does not hold", numbers
        return ("not tested" if test.difference.pairs < 2 else "not told apart"), numbers

    return _judge_pairs(measure, methods or {}, judge, reference)


def is_within(
    column: str, low: float, high: float, *, methods: Mapping[str, Any] | None = None
) -> Judge:
    """The claim that a column of the table is from `low` to `high`.

    A line whose value is None is not part of the claim.
    """
    limits = f"limit {high:g}" if low == -math.inf else f"limits {low:g} and {high:g}"

    def findings(results: Results) -> list[Finding]:
        found = []
        for line in results.lines:
            if not _is_about(line.group.keys, methods or {}):
                continue
            value = line.values[column]
            if value is None:
                continue
            value = getattr(value, "mean", value)
            outcome: Outcome = "holds" if low <= value <= high else "does not hold"
            if math.isnan(value):
                outcome = "not tested"
            found.append(Finding(line.where, outcome, f"{column} {_number(value)}, {limits}"))
        return found

    return findings


def is_at_most(column: str, limit: float, *, methods: Mapping[str, Any] | None = None) -> Judge:
    """The claim that a column of the table is at most `limit`, such as a ratio of bytes."""
    return is_within(column, -math.inf, limit, methods=methods)


def exceeds_a_limit(
    limits: Mapping[str, float], *, methods: Mapping[str, Any] | None = None
) -> Judge:
    """The claim that a column of the table exceeds its limit, as one of a control must.

    Args:
      limits: The limit of every column.
      methods: The keys of the groups that the claim is about; all by default.
    """

    def findings(results: Results) -> list[Finding]:
        found = []
        for line in results.lines:
            if not _is_about(line.group.keys, methods or {}):
                continue
            values = {column: line.values[column] for column in limits}
            outcome: Outcome = "does not hold"
            if any(math.isnan(value) for value in values.values()):
                outcome = "not tested"
            if any(values[column] > limit for column, limit in limits.items()):
                outcome = "holds"
            numbers = (f"{c} {_number(values[c])}, limit {limits[c]:g}" for c in limits)
            found.append(Finding(line.where, outcome, "; ".join(numbers)))
        return found

    return findings
