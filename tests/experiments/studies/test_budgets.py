"""The study of budgets: its clock, its claims, its smallest run, and mistakes."""

from typing import Any

import pytest

from experiments.studies.budgets import STUDY, Budgets
from experiments.study.command import analyze
from experiments.study.tidy import make_row
from experiments.training.budgets import seconds_of
from jaxcomm.wire._account import Account
from jaxcomm.wire._collective import Collective


def collective(kind: str, size: int, pairs: tuple = ()) -> Collective:
    import numpy as np

    return Collective(kind, ("data",), 4, np.dtype("int8"), (size,), 1, (), 0, (), pairs)


def test_a_stage_lasts_as_long_as_its_slowest_link() -> None:
    sent = [collective("ppermute", 100, ((1, 2), (2, 1))), collective("ppermute", 10, ((0, 1),))]
    account = Account((*sent, collective("all_gather", 8)))
    # Worker 1 sends 100 and receives 110; worker 0 sends 10; the gather sends 3 times 8.
    assert seconds_of(account, 4, 1.0, 100.0) == pytest.approx(1.1 + 0.24)
    assert seconds_of(account, 4, 20.0, 100.0) == pytest.approx(2.0 + 20 * 0.24)


def rows(method: str, seconds: float, loss: float) -> list[dict[str, Any]]:
    found = []
    for seed in range(4):
        keys = {"slowdown": 16.0, "method": method, "seed": seed}
        for step in (1, 2, 3, 4):
            point = {"step": step, "train_loss": loss / step, "seconds": seconds * step}
            found.append(make_row("point", keys, point))
        end = dict.fromkeys(
            ("step_milliseconds", "slow_sent", "slow_received", "others_sent", "others_received",
             "test_loss", "test_accuracy", "train_loss"), 1.0
        )  # fmt: skip
        end |= {"late_loss": loss * (1 + seed / 100 + (-1) ** seed / 1e3 * (loss != 1))}
        found.append(make_row("run", keys, {**end, "learning_rate": 0.1, "at_edge": ""}))
    return found


@pytest.mark.parametrize("seconds, loss, outcomes", [
    (0.5, 1.0, ["holds", "holds"]), (2.0, 1.01, ["does not hold", "holds"]),
    (0.5, 1.5, ["holds", "does not hold"]),
])  # fmt: skip
def test_claims(seconds: float, loss: float, outcomes: list[str]) -> None:
    given = [*rows("equal_8_4", 1.0, 1.0), *rows("slow_2_4", seconds, loss)]
    for number, row in enumerate(given):  # Times of paired seeds are not all equal.
        if row["kind"] == "point":
            row["seconds"] *= 1 + 0.001 * (number % 7)
    judged = analyze(STUDY, Budgets(), given, "").judgements[:2]
    assert [each.findings[0].outcome for each in judged] == outcomes
