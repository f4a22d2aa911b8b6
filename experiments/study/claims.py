"""Claims: stated in the study before the run, judged from the rows, printed with their numbers."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from experiments.study.columns import Line
from experiments.study.statistics import (
    Difference,
    equivalence,
    paired_difference,
    paired_log_ratio,
    verdict,
)
from experiments.study.tidy import Row

Outcome = Literal["holds", "does not hold", "not told apart", "not tested"]


class Finding(NamedTuple):
    """The outcome of a claim in one setting.

    Attributes:
      where: The setting, such as `ring_8, iid`.
      outcome: Whether the claim holds there.
      numbers: The numbers that show it, in words.
    """

    where: str
    outcome: Outcome
    numbers: str

    @property
    def sentence(self) -> str:
        """The finding in a sentence."""
        return f"{self.where}: {self.numbers}: {self.outcome}."


@dataclasses.dataclass(frozen=True)
class Results:
    """What a claim and the prose of a README are computed from.

    Attributes:
      config: The config of the study.
      rows: All rows, with derived columns.
      lines: The lines of the table.
      environment: The text of `environment.txt`.
      judgements: The claims with their outcomes; empty while the claims are judged.
    """

    config: Any
    rows: Sequence[Row]
    lines: Sequence[Line]
    environment: str = ""
    judgements: Sequence["Judgement"] = ()


Judge = Callable[[Results], Sequence[Finding]]


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim and its test.

    Attributes:
      text: The claim in a sentence, with its margin or level.
      judge: Returns one finding per setting.
    """

    text: str
    judge: Judge


class Judgement(NamedTuple):
    """A claim and its findings."""

    claim: Claim
    findings: Sequence[Finding]

    @property
    def summary(self) -> str:
        """The number of settings per outcome, such as `holds in 2 of 3 settings, ...`."""
        if not self.findings:
            return "not tested"
        counts = Counter(finding.outcome for finding in self.findings)
        first, *others = [f"{outcome} in {count}" for outcome, count in counts.most_common()]
        total = len(self.findings)
        return ", ".join([f"{first} of {total} setting{'s' if total > 1 else ''}", *others])

    @property
    def markdown(self) -> str:
        """The claim, its outcome and all findings."""
        findings = "".join(f"- {finding.sentence}\n" for finding in self.findings)
        return f"Claim: {self.claim.text} Outcome: {self.summary}.\n\n{findings}".rstrip()


def judge_all(claims: Sequence[Claim], results: Results) -> list[Judgement]:
    """Judges every claim."""
    return [Judgement(claim, claim.judge(results)) for claim in claims]


def state(claims: Sequence[Claim]) -> str:
    """The claims without outcomes, one per line; written before the first run."""
    return "".join(f"- {claim.text}\n" for claim in claims)


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"


def _p(value: float) -> str:
    return "p < 0.0001" if value < 1e-4 else f"p = {_number(value)}"


def _describe(difference: Difference, log: bool, confidence: str) -> str:
    mean, low, high = difference.ratio if log else difference[:3]
    what = "ratio" if log else "difference"
    return (
        f"{what} {_number(mean)} ({confidence} % interval {_number(low)} to {_number(high)}, "
        f"{_p(difference.p_value)}, {difference.pairs} seeds)"
    )


def _judge_pairs(
    measure: str,
    methods: Mapping[str, Any],
    judge: Callable[[Mapping[int, float], Mapping[int, float]], tuple[Outcome, str]],
) -> Judge:
    """Compares groups with the keys `methods` with their references, in every setting of both."""

    def findings(results: Results) -> list[Finding]:
        found = []
        for line in results.lines:
            group = line.group
            if group.is_reference or any(group.keys[name] != methods[name] for name in methods):
                continue
            if group.reference is None:
                found.append(Finding(line.where, "not tested", "there is no reference"))
                continue
            outcome, numbers = judge(group.by_seed(measure), group.reference.by_seed(measure))
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


def _check_margin(margin: float, log: bool) -> None:
    if not margin > (1 if log else 0):
        raise ValueError(f"The margin must be above {'1 for a ratio' if log else 0}, got {margin}.")


def is_better(
    measure: str,
    *,
    methods: Mapping[str, Any] | None = None,
    log: bool = False,
    lower_is_better: bool = True,
    significance: float = 0.05,
) -> Judge:
    """The claim that methods are better than the reference of the table, with paired seeds.

    It holds if a one-sided test shows that the method is better. It does not hold if a one-sided
    test shows that it is worse. Otherwise the two are not told apart.

    Args:
      measure: The column of the runs.
      methods: The keys of the groups that are claimed to be better; all by default.
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

    return _judge_pairs(measure, methods or {}, judge)


def is_no_worse(
    measure: str,
    margin: float,
    *,
    methods: Mapping[str, Any] | None = None,
    log: bool = False,
    significance: float = 0.05,
) -> Judge:
    """The claim that methods are better than the reference of the table, or worse by a margin.

    It holds if a one-sided test shows that the difference is below the margin. It does not hold if
    one shows that it is above. Otherwise the two are not told apart.

    Args:
      measure: The column of the runs; lower is better.
      margin: The margin; for ratios the largest ratio, such as 1.1 for 10 %.
      methods: The keys of the groups that are claimed to be no worse; all by default.
      log: Whether to compare ratios, for positive values.
      significance: The level of each test.
    """
    _check_margin(margin, log)

    def judge(values: Mapping, reference: Mapping) -> tuple[Outcome, str]:
        limits = {seed: each * margin if log else each + margin for seed, each in reference.items()}
        outcome = _one_sided(_compare(values, limits, log, True), significance, True)
        numbers = _describe(_compare(values, reference, log, True), log, "95")
        return outcome, f"{numbers}, margin {margin:g}"

    return _judge_pairs(measure, methods or {}, judge)


def is_equivalent(
    measure: str,
    margin: float,
    *,
    methods: Mapping[str, Any] | None = None,
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
      log: Whether to compare ratios, for positive values.
      significance: The level of each test.
    """
    _check_margin(margin, log)

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

    return _judge_pairs(measure, methods or {}, judge)


def is_at_most(column: str, limit: float, *, methods: Mapping[str, Any] | None = None) -> Judge:
    """The claim that a column of the table is at most `limit`, such as a ratio of bytes."""
    keys = methods or {}

    def findings(results: Results) -> list[Finding]:
        found = []
        for line in results.lines:
            if any(line.group.keys[name] != keys[name] for name in keys):
                continue
            value = line.values[column]
            value = getattr(value, "mean", value)
            outcome: Outcome = "holds" if value <= limit else "does not hold"
            if math.isnan(value):
                outcome = "not tested"
            found.append(
                Finding(line.where, outcome, f"{column} {_number(value)}, limit {limit:g}")
            )
        return found

    return findings
