"""The acceptance criterion of a comparison: the method passes, and the controls fail."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from experiments.cli.configs import Compare
from experiments.methods import parse_variant
from experiments.study.columns import Line


class Verdict(NamedTuple):
    """One method and optimizer, compared with the two limits."""

    line: Line
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


def judge(config: Compare, lines: Sequence[Line]) -> list[Verdict]:
    """A verdict on the method that should pass and on each control; none without `mean`."""
    judged = [
        line
        for line in lines
        if not math.isnan(line["bytes_ratio"])
        and (line["method"] == config.passing or parse_variant(line["method"]).is_control)
    ]
    return [
        Verdict(
            line,
            line["loss_ratio"] <= config.most_loss,
            line["bytes_ratio"] <= config.most_bytes,
            line["method"] == config.passing,
        )
        for line in judged
    ]


def is_complete(config: Compare, verdicts: Sequence[Verdict]) -> bool:
    """Whether there is, per optimizer, a verdict on the method and on a control."""
    required = {(optimizer, should) for optimizer in config.optimizers for should in (True, False)}
    return required <= {(verdict.line["optimizer"], verdict.should_pass) for verdict in verdicts}


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
    line, signs = verdict.line, {True: "<=", False: ">"}
    return (
        f"{line['optimizer']} {line['method']} {_REMARKS[verdict.passes, verdict.should_pass]}: "
        f"loss {line['loss_ratio']:.2f} {signs[verdict.within_loss]} {config.most_loss}, "
        f"bytes {line['bytes_ratio']:.3f} {signs[verdict.within_bytes]} {config.most_bytes}"
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
