"""The survey: its settings, its grids, and the rates that it has chosen."""

import csv

import pytest

from experiments.methods import ALL_LABELS, KINDS, METHODS, SELECTED, parse_variant
from experiments.methods.rates import SURVEYED
from experiments.studies.survey import STUDY, Survey
from experiments.study.search import search
from experiments.training.survey import grid, settings
from tests.records import committed

RECORD = committed("*_survey")[-1]


def test_all_is_every_method_and_16_on_longer_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.training.survey.train", lambda config, setting: None)
    found = settings(Survey(tasks=("digits", "text", "cifar10:folder")))
    methods = {
        task: tuple(each["method"] for each in found if each["task"] == task)
        for task in ("digits", "text", "cifar10")
    }
    assert methods["digits"] == ALL_LABELS and methods["text"] == methods["cifar10"] == SELECTED
    assert {parse_variant(label).method for label in ALL_LABELS} == set(METHODS)
    assert len(SELECTED) <= 16 and {parse_variant(label).kind for label in SELECTED} == set(KINDS)
    named = settings(Survey(tasks=("digits", "text"), methods=("mean", "qsgd")))
    assert [each["method"] for each in named] == ["mean", "qsgd"] * 2


def test_every_method_has_the_same_number_of_trials() -> None:
    config = Survey()
    budget = STUDY.budget(config)._replace(extensions=0)
    for method in ["mean", *(name for name in METHODS if METHODS[name].grid)]:
        tried: list[dict] = []

        def trial(parameters: dict, seed: int, tried: list[dict] = tried) -> float:
            tried.append(parameters)
            return abs(parameters["learning_rate"] - 0.02)

        choice = search(grid(config, {"method": method}), budget, trial)
        assert choice.trials == len(tried) == 14
        assert set(tried[0]) == {"learning_rate", *METHODS[method].grid}


def test_the_first_rates_of_train_are_the_choices_of_the_survey() -> None:
    with (RECORD / "table.csv").open(encoding="utf-8") as file:
        chosen = {
            line["method"]: float(line["learning_rate"].split()[0])
            for line in csv.DictReader(file)
            if (line["task"], line["optimizer"]) == ("digits", "sgd")
        }
    assert chosen == SURVEYED, "write the choices of the new record to experiments/methods/rates.py"
