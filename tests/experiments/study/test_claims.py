"""Claims: outcomes per setting, their numbers, and the summary."""

import dataclasses
import math
from typing import Any

import pytest

from experiments.study.claims import Claim, Finding, Judgement, Results, reject
from experiments.study.columns import Column, Table, key
from experiments.study.groups import mean_of, over_reference
from experiments.study.judges import (
    is_at_most,
    is_better,
    is_equivalent,
    is_no_worse,
    is_within,
)
from experiments.study.tidy import make_row

TABLE = Table(
    by=("graph", "method"),
    columns=(
        key("graph"),
        key("method"),
        Column("ratio", over_reference(mean_of("loss"))),
        Column("loss", mean_of("loss")),
    ),
    reference={"method": "mean"},
)


def results(**losses: list[float]) -> Results:
    """Runs of `graph_method=[losses]`."""
    rows = [
        make_row("run", dict(zip(("graph", "method"), name.split("_"), strict=True))
                 | {"seed": seed}, {"loss": loss})
        for name, each in losses.items() for seed, loss in enumerate(each)
    ]  # fmt: skip
    return Results(None, rows, TABLE.lines(rows))


BASE = [1.0, 1.1, 0.9]
THREE = results(
    a_mean=BASE, a_top=[0.8, 0.9, 0.72], b_mean=BASE, b_top=[1.3, 1.4, 1.25],
    c_mean=BASE, c_top=[1.2, 0.8, 1.0],
)  # fmt: skip


def outcomes(judge: Any, data: Results) -> list[str]:
    return [each.outcome for each in judge(data)]


def test_a_claim_of_better_has_three_outcomes() -> None:
    found = is_better("loss")(THREE)
    assert [each.where for each in found] == ["a, top", "b, top", "c, top"]
    assert found[0].numbers.startswith("loss difference -0.193 (95 % interval -0.222 to -0.1")
    assert found[0].numbers.endswith(", 3 seeds)")
    expected = ["holds", "does not hold", "not told apart"]
    assert outcomes(is_better("loss"), THREE) == outcomes(is_better("loss", log=True), THREE)
    assert outcomes(is_better("loss"), THREE) == expected
    higher = is_better("loss", lower_is_better=False)
    assert outcomes(higher, THREE) == [expected[1], expected[0], expected[2]]
    diverged = results(a_mean=BASE, a_top=[0.1, 0.1, math.nan])
    assert outcomes(is_better("loss"), diverged) == ["does not hold"]
    assert outcomes(is_equivalent("loss", 99), diverged) == ["does not hold"]


def test_a_claim_of_equivalence_needs_its_margin() -> None:
    data = results(a_mean=BASE, a_top=[1.01, 1.12, 0.9])
    for margin, outcome in ((0.05, "holds"), (0.012, "not told apart")):
        (found,) = is_equivalent("loss", margin)(data)
        assert found.outcome == outcome and f"margin {margin:g}, equivalence p" in found.numbers
    ratio = is_equivalent("loss", 1.1, log=True)
    assert outcomes(ratio, data) == ["holds"]
    assert "ratio 1.009 (90 % interval" in ratio(data)[0].numbers
    far = results(a_mean=BASE, a_top=[2.01, 2.12, 1.9])
    assert outcomes(ratio, far) == ["does not hold"]
    with pytest.raises(ValueError, match="above 1 for a ratio"):
        is_equivalent("loss", 0.9, log=True)


@pytest.mark.parametrize("log", [False, True])
def test_a_claim_of_no_worse_is_one_sided(log: bool) -> None:
    """A method that is far better is no worse, and not equivalent."""
    data = results(
        a_mean=BASE, a_top=[0.5, 0.52, 0.49], b_mean=BASE, b_top=[1.02, 1.12, 0.92],
        c_mean=BASE, c_top=[1.2, 1.35, 1.1], d_mean=BASE, d_top=[1.0, 1.4, 0.8],
    )  # fmt: skip
    found = is_no_worse("loss", 1.1 if log else 0.1, log=log)(data)
    assert [each.outcome for each in found] == ["holds", "holds", "does not hold", "not told apart"]
    assert found[1].numbers.endswith(f", 3 seeds), margin {1.1 if log else 0.1}")
    assert ("ratio 1.02 (" if log else "difference 0.02 (") in found[1].numbers
    assert is_equivalent("loss", 1.1 if log else 0.1, log=log)(data)[0].outcome == "does not hold"


def test_limits_hold_at_their_value_and_skip_lines_without_one() -> None:
    data = results(a_mean=[1.0], a_top=[2.0], a_top1=[3.0])
    found = is_at_most("ratio", 2)(data)
    assert outcomes(is_at_most("ratio", 2), data) == ["holds", "holds", "does not hold"]
    assert found[2].sentence == "a, top1: ratio 3, limit 2: does not hold."
    (only,) = is_at_most("ratio", 2, methods={"method": "top1"})(data)
    assert only == found[2]
    lines = [dataclasses.replace(line, values={"ratio": value})
             for line, value in zip(data.lines, (0.9, 1.2, None), strict=True)]  # fmt: skip
    found = is_within("ratio", 0.95, 1.25)(dataclasses.replace(data, lines=lines))
    assert [each.outcome for each in found] == ["does not hold", "holds"]
    assert found[0].numbers == "ratio 0.9, limits 0.95 and 1.25"


@dataclasses.dataclass(frozen=True)
class Config:
    steps: int = 3
    devices: int | None = None
    record: str = "toy"


def test_a_study_with_default_options_rejects_a_claim_that_does_not_hold() -> None:
    def of(
        config: Config, *outcomes: str, environment: str = "a: b\ndevices: 8 x cpu\n"
    ) -> Results:
        found = [Finding("a", outcome, "") for outcome in outcomes]
        judgement = Judgement(Claim("It is better.", lambda results: found), found)
        return Results(config, [], [], environment, (judgement,))

    assert reject(of(Config(), "holds", "holds")) == 0
    for outcomes in ((), ("holds", "not told apart"), ("does not hold",)):
        assert reject(of(Config(record="other", devices=8), *outcomes)) == 1
        assert reject(of(Config(steps=4), *outcomes)) == 0
        assert reject(of(Config(), *outcomes, environment="devices: 4 x cpu\n")) == 0
    assert of(Config(devices=3)).workers == 3 and of(Config(), environment="").workers == 0
