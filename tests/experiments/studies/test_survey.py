"""The survey and digits: settings, trials, rates that were chosen, and claims that must fail."""

import csv
import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from experiments.methods import ALL_LABELS, METHODS, SELECTED, SURVEYED
from experiments.studies import survey
from experiments.studies.survey import CONTROLS, DIGITS, SURVEY, Digits, Survey
from experiments.study.claims import Results
from experiments.study.run import analyze, read_results
from experiments.study.statistics import holm
from experiments.study.table import Table, key, only_in_csv
from experiments.study.tuning import EXTENSIONS, search
from tests.records import committed

NAN = math.nan


def test_all_is_every_method_and_16_on_longer_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "train", lambda config, setting: None)
    found = survey.settings(Survey(tasks=("digits", "text:file")))
    assert [(each["task"], each["method"]) for each in found] == [
        *(("digits", label) for label in ALL_LABELS), *(("text", label) for label in SELECTED)
    ]  # fmt: skip


def test_every_method_has_the_same_number_of_trials_before_extensions() -> None:
    counts = {}
    for method in ["mean", *(name for name in METHODS if METHODS[name].grid)]:

        def loss(parameters: dict[str, Any]) -> float:
            rate, *others = parameters.values()
            return abs(math.log(rate / 0.02)) + sum((value - 0.9) ** 2 for value in others)

        grid = SURVEY.grid(Survey(), {"method": method})
        assert {*grid} == {"learning_rate", *METHODS[method].grid}
        counts[method] = search(grid, SURVEY.budget(Survey()), loss).trials
    assert len(counts) > 5 and min(counts.values()) == counts["mean"] == 14
    assert max(counts.values()) <= 14 + EXTENSIONS


def test_the_first_rates_of_train_are_the_choices_of_the_survey() -> None:
    with (committed("*_survey")[-1] / "table.csv").open(encoding="utf-8") as file:
        chosen = {
            line["method"]: float(line["learning_rate"].split()[0])
            for line in csv.DictReader(file)
            if (line["task"], line["optimizer"]) == ("digits", "sgd")
        }
    assert chosen == SURVEYED, "write the choices of the new record to experiments/methods.py"


def test_p_values_are_corrected_over_all_compared_lines() -> None:
    losses = {"mean": (1.0, 2.0, 3.0), "a": (1.4, 2.2, 3.5), "b": (1.3, 2.1, 3.3), "c": (9.0, 2, 1)}
    rows = [
        {"kind": "run", "method": name, "seed": seed, "test_loss": loss}
        for name, each in losses.items() for seed, loss in enumerate(each)
    ]  # fmt: skip
    columns = key("method"), only_in_csv("p", survey.p_worse)
    first, *others = Table(("method",), columns, {"method": "mean"}).lines(rows)
    p_values = [stats.ttest_rel(np.log(losses[name]), np.log(losses["mean"]), alternative="greater")
                .pvalue for name in "abc"]  # fmt: skip
    assert first["p"] is None
    assert [line["p"] for line in others] == pytest.approx(holm(p_values))


def digits(**ratios: tuple[float, float]) -> Results:
    """Methods with the ratios of loss and bytes to those of `mean`."""
    names = {
        "mean": "mean",
        "passing": "global_qsgd:8",
        "first": CONTROLS[0],
        "second": CONTROLS[1],
    }
    names_of_others = ("test_accuracy", "compression_error", "step_milliseconds", "test_loss")
    others = {"optimizer": "sgd", "seed": 0, **dict.fromkeys(names_of_others, 1.0)}
    rows = [
        {"kind": "run", "method": names[name], **others, "train_loss": loss, "bytes_per_step": sent}
        for name, (loss, sent) in {"mean": (1, 1), **ratios}.items()
    ]
    return analyze(DIGITS, Digits(), rows, "devices: 8 x cpu\n")


@pytest.mark.parametrize(
    ("passing", "control", "is_met"),
    [
        ((1.2, 0.25), (2.0, 0.25), True),
        ((1.2, 0.25), (1.2, 0.27), True),
        ((1.6, 0.25), (2.0, 0.25), False),
        ((1.2, 0.27), (2.0, 0.25), False),
        ((1.2, 0.25), (1.4, 0.25), False),
        ((NAN, 0.25), (2.0, 0.25), False),
        ((1.2, 0.25), (NAN, 0.25), False),
    ],
)
def test_both_limits_apply_to_the_method_and_to_controls(
    passing: tuple[float, float], control: tuple[float, float], is_met: bool
) -> None:
    results = digits(passing=passing, first=control, second=(9.0, 0.1))
    assert results.all_hold == is_met and DIGITS.exit_code(results) == int(not is_met)
    assert DIGITS.exit_code(digits(passing=passing)) == 1  # Without controls.


def test_the_claims_of_digits_hold_in_its_record() -> None:
    results = read_results(DIGITS, committed("*_digits")[-1])
    assert [len(each.findings) for each in results.judgements] == [2, 2, 4]
    assert results.workers == 8 and results.all_hold and DIGITS.exit_code(results) == 0
