"""Claims: stated in the study before the run, judged from the rows, printed with their numbers."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from experiments.study.columns import Line
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
      are_stated: Whether the record has the claims from before its first run; older ones lack them.
    """

    config: Any
    rows: Sequence[Row]
    lines: Sequence[Line]
    environment: str = ""
    judgements: Sequence["Judgement"] = ()
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
            if field.name not in ("devices", "record", "records", "resume")
        )

    @property
    def all_hold(self) -> bool:
        """Whether every claim is tested, and holds in every setting."""
        return all(
            each.findings and all(finding.outcome == "holds" for finding in each.findings)
            for each in self.judgements
        )


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


def reject(results: Results) -> int:
    """The exit code 1 if a claim does not hold with the default options on 8 workers."""
    return int(results.is_default and results.workers == 8 and not results.all_hold)


def judge_all(claims: Sequence[Claim], results: Results) -> list[Judgement]:
    """Judges every claim."""
    return [Judgement(claim, claim.judge(results)) for claim in claims]


def state(study: str, claims: Sequence[Claim]) -> str:
    """The claims of a study without outcomes; written before the first run."""
    listed = "".join(f"- {claim.text}\n" for claim in claims) or "None.\n"
    return f"# Claims of the study {study}, stated before the first run\n\n{listed}"
