"""Claims: stated in the study before the run, judged from the rows, printed with their numbers.

A claim about several settings has a test in each. P-values are corrected for the number of settings
by Holm's method; intervals are not corrected.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from experiments.study.record import OF_THE_MACHINE, Row
from experiments.study.statistics import Difference, holm
from experiments.study.table import Line

Outcome = Literal["holds", "does not hold", "inconclusive", "not tested"]
SIGNIFICANCE = 0.05


class Finding(NamedTuple):
    """The outcome of a claim in one setting, such as `ring_8, iid`, and its numbers in words."""

    where: str
    outcome: Outcome
    numbers: str


Judge = Callable[["Results"], Sequence[Finding]]


class Claim(NamedTuple):
    """A claim in a sentence, with its margin or level, and its test, with a finding per setting."""

    text: str
    judge: Judge


class Judgement(NamedTuple):
    """A claim and its findings."""

    claim: Claim
    findings: Sequence[Finding]

    @property
    def markdown(self) -> str:
        """The claim, the number of settings per outcome, and all findings."""
        counts = Counter(finding.outcome for finding in self.findings)
        total = f" of {len(self.findings)} setting{'s' if len(self.findings) > 1 else ''}"
        parts = [f"{outcome} in {count}" for outcome, count in counts.most_common()]
        summary = ", ".join([*(part + total for part in parts[:1]), *parts[1:]]) or "not tested"
        findings = "".join(f"- {each[0]}: {each[2]}: {each[1]}.\n" for each in self.findings)
        return f"Claim: {self.claim.text} Outcome: {summary}.\n\n{findings}".rstrip()


@dataclasses.dataclass(frozen=True)
class Results:
    """What a claim and the prose of a README are computed from.

    Attributes:
      config: The config of the study.
      rows: All rows, with derived columns.
      lines: The lines of the table.
      environment: The text of `environment.txt`.
      judgements: The claims with their outcomes; empty while the claims are judged.
      are_stated: Whether the record has the claims from before its first run; older ones lack them.
    """

    config: Any
    rows: Sequence[Row]
    lines: Sequence[Line]
    environment: str = ""
    judgements: Sequence[Judgement] = ()
    are_stated: bool = True

    @property
    def workers(self) -> int:
        """The option `devices`, or the number of devices in the environment."""
        found = re.search(r"^devices: (\d+)", self.environment, re.MULTILINE)
        return self.config.devices or int(found[1] if found else 0)

    @property
    def is_default(self) -> bool:
        """Whether all options but those of the machine have their defaults."""
        return all(
            getattr(self.config, field.name) == field.default
            for field in dataclasses.fields(self.config)
            if field.name not in ("devices", *OF_THE_MACHINE)
        )

    @property
    def all_hold(self) -> bool:
        """Whether every claim is tested, and holds in every setting."""
        return all(
            each.findings and all(finding.outcome == "holds" for finding in each.findings)
            for each in self.judgements
        )


def state(study: str, claims: Sequence[Claim]) -> str:
    """The claims of a study without outcomes; written before the first run."""
    listed = "".join(f"- {claim.text}\n" for claim in claims) or "None.\n"
    return f"# Claims of the study {study}, stated before the first run\n\n{listed}"


def number(value: float, digits: int = 3) -> str:
    """The number with a few digits; `-` for NaN."""
    return "-" if math.isnan(value) else f"{value:.{digits}g}"


def is_about(keys: Mapping[str, Any], methods: Mapping[str, Any]) -> bool:
    """Whether a group has the keys `methods`; a tuple has several values of a key."""
    return all(
        keys[name] in (wanted if isinstance(wanted, tuple) else (wanted,))
        for name, wanted in methods.items()
    )


def _judge_pairs(
    measure: str,
    tests: Callable[[Difference], tuple[float, float]],
    *,
    methods: Mapping[str, Any] | None = None,
    reference: Mapping[str, Any] | None = None,
    log: bool = False,
    level: float = 0.95,
    note: str = "",
) -> Judge:
    """Compares groups with the keys `methods` with their references, in every setting of both.

    `tests(difference)` are the p-values that the claim holds and that it does not.
    """

    def findings(results: Results) -> list[Finding]:
        pairs = []
        for line in results.lines:
            group = line.group if reference is None else line.group.compared_with(reference)
            if not group.is_reference and is_about(group.keys, methods or {}):
                pairs.append((line.where, group.difference(measure, log=log, level=level)))
        p_values = [tests(each) if each else (math.nan, math.nan) for _, each in pairs]
        holds, fails = (holm([p[side] for p in p_values]) for side in (0, 1))
        found = []
        for (where, each), p_holds, p_fails in zip(pairs, holds, fails, strict=True):
            if each is None:
                found.append(Finding(where, "not tested", "there is no reference"))
                continue
            outcome: Outcome = "inconclusive" if each.pairs > 1 else "not tested"
            p_value = min(p_holds, p_fails)
            if p_value < SIGNIFICANCE:
                outcome = "holds" if p_holds == p_value else "does not hold"
            # Ratios are close to 1.
            mean, low, high = (
                number(x, 4 if log else 3) for x in (each.ratio if log else each)[:3]
            )
            p = "p < 0.0001" if p_value < 1e-4 else f"p = {number(p_value)}"
            numbers = (
                f"{measure} {'ratio' if log else 'difference'} {mean} ({100 * level:g} % interval "
                f"{low} to {high}, {p}, {each.pairs} seeds){note}"
            )
            found.append(Finding(where, outcome, numbers))
        return found

    return findings


def is_better(measure: str, **options: Any) -> Judge:
    """The claim that methods are better than the reference of the table, with paired seeds.

    It holds if a one-sided test shows that the method is better. It does not hold if a one-sided
    test shows that it is worse. Otherwise the comparison is inconclusive.

    Args:
      measure: The column of the runs; lower values are better.
      options: `methods`, the keys of the groups that are claimed to be better, such as
        `{"method": ("matcha", "sgp")}`, by default all; `reference`, the keys of the groups than
        which they are better, by default those of the table; `log`, whether to compare ratios of
        positive values.
    """
    return _judge_pairs(measure, lambda each: (each.p_below(), each.p_above()), **options)


def is_no_worse(measure: str, margin: float, *, log: bool = False, **options: Any) -> Judge:
    """The claim that methods are better than the reference of the table, or worse by a margin.

    The tests are those of `is_better` of the difference and the margin.
    With `log` the margin is the largest ratio, such as 1.1 for 10 % more or 0.5 for half.
    """
    limit, note = math.log(margin) if log else margin, f", margin {margin:g}"
    tests = lambda each: (each.p_below(limit), each.p_above(limit))  # noqa: E731
    return _judge_pairs(measure, tests, log=log, note=note, **options)


def is_equivalent(measure: str, margin: float, *, log: bool = False, **options: Any) -> Judge:
    """The claim that methods are as good as the reference of the table, up to a margin.

    It holds if two one-sided tests show that the difference is within the margin. It does not hold
    if one of them shows that it is outside. With `log` the margin is the largest ratio.
    """
    limit, note = math.log(margin) if log else margin, f", margin {margin:g}"

    def tests(each: Difference) -> tuple[float, float]:
        inside = max(each.p_below(limit), each.p_above(-limit))
        return inside, min(each.p_above(limit), each.p_below(-limit))

    level = 1 - 2 * SIGNIFICANCE
    return _judge_pairs(measure, tests, log=log, level=level, note=note, **options)


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
            if line[column] is not None and is_about(line.group.keys, methods or {}):
                value = getattr(line[column], "mean", line[column])
                outcome: Outcome = "holds" if low <= value <= high else "does not hold"
                outcome = "not tested" if math.isnan(value) else outcome
                found.append(Finding(line.where, outcome, f"{column} {number(value)}, {limits}"))
        return found

    return findings


def is_at_most(column: str, limit: float, *, methods: Mapping[str, Any] | None = None) -> Judge:
    """The claim that a column of the table is at most `limit`, such as a ratio of bytes."""
    return is_within(column, -math.inf, limit, methods=methods)
