"""The acceptance criterion of a comparison: the method passes, and the controls fail."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from experiments.cli.configs import Compare
from experiments.methods import parse_variant
from experiments.studies.digits.table import Row


class Verdict(NamedTuple):
    """One method and optimizer, compared with the two limits."""

    row: Row
    within_loss: bool
    within_bytes: bool
    should_pass: bool

    @property
    def passes(self) -> bool:
        """Whether the method is within both limits."""
        return self.within_loss and self.within_bytes

    @property
    def holds(self) -> bool:
        """Whether the method passes if and only if it should."""
        return self.passes == self.should_pass


def judge(config: Compare, rows: Sequence[Row]) -> list[Verdict]:
    """A verdict on the method that should pass and on each control; none without `mean`."""
    judged = [
        row
        for row in rows
        if not math.isnan(row.bytes_ratio)
        and (row.method == config.passing or parse_variant(row.method).is_control)
    ]
    return [
        Verdict(
            row,
            row.loss_ratio <= config.most_loss,
            row.bytes_ratio <= config.most_bytes,
            row.method == config.passing,
        )
        for row in judged
    ]


def is_complete(config: Compare, verdicts: Sequence[Verdict]) -> bool:
    """Whether there is, per optimizer, a verdict on the method and on a control."""
    required = {(optimizer, should) for optimizer in config.optimizers for should in (True, False)}
    return required <= {(verdict.row.optimizer, verdict.should_pass) for verdict in verdicts}


def is_accepted(config: Compare, verdicts: Sequence[Verdict]) -> bool:
    """Whether all required verdicts are there and as expected."""
    return is_complete(config, verdicts) and all(verdict.holds for verdict in verdicts)


_REMARKS = {
    (True, True): "passes, as expected",
    (True, False): "passes, BUT SHOULD FAIL",
    (False, True): "fails, BUT SHOULD PASS",
    (False, False): "fails, as expected",
}


def _describe(config: Compare, verdict: Verdict) -> str:
    row, signs = verdict.row, {True: "<=", False: ">"}
    return (
        f"{row.optimizer} {row.method} {_REMARKS[verdict.passes, verdict.should_pass]}: "
        f"loss {row.loss_ratio:.2f} {signs[verdict.within_loss]} {config.most_loss}, "
        f"bytes {row.bytes_ratio:.3f} {signs[verdict.within_bytes]} {config.most_bytes}"
    )


def describe(config: Compare, verdicts: Sequence[Verdict]) -> str:
    """States whether the criterion is met, and each ratio with its limit."""
    outcome = "met" if is_accepted(config, verdicts) else "NOT met"
    if not is_complete(config, verdicts):
        outcome = f"not judged: it requires mean, {config.passing} and a control"
    limits = f"{config.most_loss} times the final loss of mean and {config.most_bytes} of its bytes"
    return "\n".join(
        [f"Acceptance ({config.passing}, but no control, within {limits}): {outcome}."]
        + [f"- {_describe(config, verdict)}" for verdict in verdicts]
    )
