"""Claims: outcomes per setting, their numbers, and the summary."""

import math
from typing import Any

import pytest

from experiments.study.claims import (
    Claim,
    Finding,
    Judgement,
    Results,
    is_at_most,
    is_better,
    is_equivalent,
    is_no_worse,
    is_within,
)
from experiments.study.record import make_row
from experiments.study.table import Column, Table, difference, key, mean_of, over_reference

TABLE = Table(
    by=("graph", "method"),
    columns=(
        *map(key, ("graph", "method")),
        Column("ratio", over_reference(mean_of("loss"))),
        Column("paired", difference("loss", log=True)),
    ),
    reference={"method": "mean"},
)
HOLDS, FAILS, OPEN, UNTESTED = "holds", "does not hold", "inconclusive", "not tested"


def results(**losses: list[float]) -> Results:
    """Runs of `graph_method=[losses]`."""
    rows = []
    for name, of_seeds in losses.items():
        keys = dict(zip(("graph", "method"), name.split("_"), strict=True))
        rows += [make_row("run", {**keys, "seed": n}, {"loss": x}) for n, x in enumerate(of_seeds)]
    return Results(None, rows, TABLE.lines(rows))


BASE = [1.0, 1.1, 0.9]
THREE = results(
    a_mean=BASE, a_top=[0.8, 0.9, 0.72], b_mean=BASE, b_top=[1.3, 1.4, 1.23],
    c_mean=BASE, c_top=[1.2, 0.8, 1.0], d_top=BASE, e_mean=BASE[:1], e_top=BASE[1:2],
)  # fmt: skip


def outcomes(judge: Any, data: Results) -> list[str]:
    return [each.outcome for each in judge(data)]


def test_a_claim_of_better_has_four_outcomes() -> None:
    judge = is_better("loss")
    found = judge(THREE)
    assert [each.where for each in found] == [f"{graph}, top" for graph in "abcde"]
    assert found[0].numbers.startswith("loss difference -0.193 (95 % interval -0.222 to -0.1")
    assert found[0].numbers.endswith(", 3 seeds)") and "no reference" in found[3].numbers
    assert outcomes(judge, THREE) == [HOLDS, FAILS, OPEN, UNTESTED, UNTESTED]
    assert outcomes(is_better("loss", log=True), THREE) == outcomes(judge, THREE)
    other = is_better("loss", methods={"method": "mean"}, reference={"method": "top"})
    assert outcomes(other, THREE) == [FAILS, HOLDS, OPEN, UNTESTED]
    diverged = results(a_mean=BASE, a_top=[0.1, 0.1, math.nan])
    for each in (judge, is_equivalent("loss", 99), is_no_worse("loss", 9, log=True)):
        assert outcomes(each, diverged) == [FAILS]
    shown = Judgement(Claim("It is better.", judge), found).markdown
    assert shown.startswith("Claim: It is better. Outcome: not tested in 2 of 5 settings, holds in")
    assert shown.splitlines()[-1].endswith("1 seeds): not tested.")


def test_holm_over_settings_changes_an_outcome() -> None:
    one = {"a_mean": BASE, "a_top": [0.97, 1.05, 0.885]}  # p = 0.045.
    two = results(**one, c_mean=BASE, c_top=[1.2, 0.8, 1.0])
    assert outcomes(is_better("loss"), results(**one)) == [HOLDS]
    assert outcomes(is_better("loss"), two) == [OPEN, OPEN]
    assert outcomes(is_better("loss", methods={"graph": ("a", "z")}), two) == [HOLDS]


@pytest.mark.parametrize("log", [False, True])
def test_claims_with_a_margin(log: bool) -> None:
    """A method that is far better is no worse, and not equivalent."""
    data = results(
        a_mean=BASE, a_top=[0.5, 0.52, 0.49], b_mean=BASE, b_top=[1.02, 1.12, 0.92],
        c_mean=BASE, c_top=[1.2, 1.33, 1.1], d_mean=BASE, d_top=[1.0, 1.4, 0.8],
    )  # fmt: skip
    margin = 1.1 if log else 0.1
    found = is_no_worse("loss", margin, log=log)(data)
    assert [each.outcome for each in found] == [HOLDS, HOLDS, FAILS, OPEN]
    assert found[1].numbers.endswith(f", 3 seeds), margin {margin}")
    assert ("ratio 1.02 (95 %" if log else "difference 0.02 (95 %") in found[1].numbers
    found = is_equivalent("loss", margin, log=log)(data)
    assert [each.outcome for each in found] == [FAILS, HOLDS, FAILS, OPEN]
    assert "(90 % interval" in found[1].numbers


def test_limits_hold_at_their_value_and_skip_lines_without_one() -> None:
    data = results(a_mean=[1.0], a_top=[2.0], a_top1=[3.0], b_top=[1.0])
    found = is_at_most("ratio", 2)(data)
    assert [each.outcome for each in found] == [HOLDS, HOLDS, FAILS, UNTESTED]
    assert found[2] == Finding("a, top1", FAILS, "ratio 3, limit 2")
    assert is_at_most("ratio", 2, methods={"method": "top1"})(data) == [found[2]]
    found = is_within("paired", 0.95, 2)(data)  # The reference has none.
    assert [each.outcome for each in found] == [HOLDS, FAILS]
    assert found[0].numbers == "paired 2, limits 0.95 and 2"
