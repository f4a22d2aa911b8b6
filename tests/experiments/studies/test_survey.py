"""The survey: its settings, its grids, and a small one from its options to its README."""

import csv
from pathlib import Path

import pytest

from experiments.methods import ALL_LABELS, KINDS, METHODS, SELECTED, parse_variant
from experiments.methods.rates import SURVEYED
from experiments.studies.survey import STUDY, Survey
from experiments.study import command
from experiments.study.search import search
from experiments.study.store import read
from experiments.training.survey import REASONS, grid, settings
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
    assert len(SELECTED) <= 16 and set(SELECTED) < set(ALL_LABELS)
    assert {parse_variant(label).kind for label in SELECTED} == set(KINDS)
    assert {REASONS[KINDS[parse_variant(label).kind]] for label in ALL_LABELS} == {
        *REASONS.values()
    }
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


@pytest.mark.slow
def test_a_small_survey_of_two_tasks(tmp_path: Path) -> None:
    """On digits, and on a text that the user names."""
    text = tmp_path / "a.txt"
    text.write_text("Compression reduces the bytes of gradients. " * 60)
    config = Survey(
        tasks=("digits", f"text:{text}"), methods=("mean", "signum"), seeds=2, steps=2,
        long_steps=8, points=2, batch=8, learning_rates=(0.01, 0.1), trials=2, devices=2,
        record="tiny", records=str(tmp_path),
    )  # fmt: skip
    assert command.main(STUDY, config) == 0
    (folder,) = tmp_path.glob("*_tiny")
    rows = read(folder)
    runs, trials = ([row for row in rows if row["kind"] == kind] for kind in ("run", "trial"))
    assert [(row["task"], row["method"], row["seed"]) for row in runs] == [
        (task, method, seed)
        for task in ("digits", "text") for method in ("mean", "signum") for seed in (0, 1)
    ]  # fmt: skip
    assert {row["seed"] for row in trials} == {2}
    assert {row["steps"] for row in runs if row["task"] == "text"} == {8}
    assert all(0.5 <= row["momentum"] <= 0.99 for row in runs if row["method"] == "signum")
    assert [row["step"] for row in rows if row["kind"] == "point"][:2] == [1, 2]
    readme = (folder / "README.md").read_text()
    assert readme.startswith("# Which methods lose") and "text, sgd: " in readme
    assert f"digits: 2 steps; text:{text}: 8 steps, a quarter in trials" in readme
    assert (folder / "test_loss_against_bytes.png").read_bytes().startswith(b"\x89PNG")
