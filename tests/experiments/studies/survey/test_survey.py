"""A survey: choice of rates, losing methods, reasons and record."""

import csv
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from experiments.cli.configs import Compare, Survey
from experiments.methods import ALL_LABELS, METHODS, Variant, make_variant, parse_variant
from experiments.methods._sparsifiers import WARM_UP_STEPS
from experiments.studies.survey import report
from experiments.studies.survey import run as survey
from experiments.studies.survey import table as survey_table
from experiments.studies.survey.table import SIGNIFICANCE, Row, p_value, summarize
from experiments.study import tuning
from experiments.study.record import NoRecord, read_metrics
from experiments.tasks.task import Task
from experiments.training.train import Program, make_mesh, make_program, train
from jaxcomm.aggregation import WarmupState

RECORDS = sorted((Path(survey.__file__).parents[2] / "records").glob("*_survey*"))


@pytest.fixture(scope="module")
def task() -> Task:
    return Task("digits")


def simulated(task: Task, variant: Variant, workers: int = 2) -> Program:
    mesh = make_mesh(workers)
    return make_program(task, variant, "sgd", 0.05, 32, mesh, simulated=True)


@pytest.fixture(scope="module")
def program(task: Task) -> Program:
    return simulated(task, make_variant("global_qsgd", 8))


def test_held_out_examples_are_not_trained_on(task: Task, program: Program) -> None:
    whole, held_out = task.dataset, task.hold_out().dataset
    assert len(held_out.test_inputs) == round(0.2 * len(whole.train_inputs))

    def rows(*parts: np.ndarray) -> list[bytes]:
        return sorted(image.tobytes() for image in np.concatenate(parts))

    assert rows(held_out.train_inputs, held_out.test_inputs) == rows(whole.train_inputs)
    tuned = program._replace(task=task.hold_out())
    epochs = math.lcm(len(held_out.train_inputs), 32) // 32
    batches = itertools.islice(tuned.batches(tuned.task, 0), epochs)
    assert {*rows(*(inputs for inputs, _ in batches))} == {*rows(held_out.train_inputs)}


@pytest.mark.slow
def test_the_simulation_agrees_with_devices(task: Task, program: Program) -> None:
    on_devices = make_program(task, program.variant, "sgd", 0.05, 32, make_mesh(2))
    *_, expected = train(on_devices, seed=0, steps=6, log_every=3)
    *_, found = train(program, seed=0, steps=6, log_every=3)
    for name in ("train_loss", "test_loss", "compression_error"):
        assert found[name] == pytest.approx(expected[name], rel=1e-3), name
    assert found["bytes_per_step"] == expected["bytes_per_step"] > 0


def test_a_learning_rate_is_used_and_shares_the_step(task: Task, program: Program) -> None:
    def moved(rate: float) -> float:
        tried = program._replace(learning_rate=rate)
        params, state = tried.start(0)
        first = np.asarray(params["Dense_0"]["kernel"])
        params, state, _ = tried.step(params, state, next(tried.batches(task, 0)))
        return np.abs(np.asarray(params["Dense_0"]["kernel"]) - first).max()

    assert moved(0.5) == pytest.approx(10 * moved(0.05), rel=1e-2)


def test_bytes_are_those_of_the_stage_that_a_step_takes(task: Task) -> None:
    warmup, *stages = (
        simulated(task, make_variant(name, None))
        for name in ("warm_up", "ef_top_10_percent", "ef_top_1_percent")
    )
    _, (observed, _) = warmup.start(0)
    for stage, alone in zip((1, 3), stages, strict=True):
        inner: WarmupState = observed.inner._replace(step=np.int32(stage * WARM_UP_STEPS))
        found = warmup.bytes_of_step((observed._replace(inner=inner),))
        assert found == alone.account.bytes_per_worker


def test_the_optimizer_has_no_momentum_if_the_aggregator_has(task: Task) -> None:
    for name in ("signum", "deep_gradient_compression"):
        assert METHODS[name].has_momentum
    with_own, without = (
        simulated(task, make_variant(name, None)).start(0)[1][1].inner_state
        for name in ("signum", "sign_sgd")
    )
    assert len(np.atleast_1d(with_own[0])) == 0 and without[0].trace


def test_the_rate_of_least_mean_loss_is_chosen() -> None:
    def trial(rate: float, loss: float) -> dict:
        return {"learning_rate": rate, "validation_loss": loss}

    trials = [
        trial(*each)
        for each in ((0.4, 0.1), (0.4, math.nan), (0.1, 0.3), (0.1, 0.5), (0.2, 0.6), (0.2, 0.1))
    ]
    losses = tuning.mean_losses(trials)
    assert losses == {0.1: pytest.approx(0.4), 0.2: pytest.approx(0.35), 0.4: math.inf}
    assert tuning.choose(losses) == 0.2
    assert tuning.choose({0.3: 1.0, 0.1: 1.0}) == 0.1
    assert [tuning.is_at_edge(rate, losses) for rate in (0.1, 0.2, 0.4)] == [True, False, True]
    assert not tuning.is_at_edge(0.1, {0.1: 1.0})


def test_every_rate_is_tried_with_seeds_that_are_not_reported(
    monkeypatch: pytest.MonkeyPatch, task: Task, program: Program
) -> None:
    seen = []

    def fake(program: Program, seed: int, steps: int, log_every: int) -> list[dict]:
        seen.append((program.learning_rate, seed))
        assert program.task is held_out and steps == log_every == 7
        run = {"method": "m", "optimizer": "sgd", "seed": seed}
        return [run | {"learning_rate": program.learning_rate, "test_loss": 1, "test_accuracy": 0}]

    held_out = task.hold_out()
    monkeypatch.setattr(survey, "train", fake)
    config = Survey(learning_rates=(0.2, 0.1, 0.2), steps=7, seeds=3, tuning_seeds=2)
    assert len(survey.tune(config, program, held_out, NoRecord())) == 4
    assert seen == [(0.1, 3), (0.1, 4), (0.2, 3), (0.2, 4)]


def test_p_values_against_the_closed_form_of_two_degrees_of_freedom() -> None:
    logs = np.array([0.5, 0.1, 0.3])
    t = logs.mean() / (logs.std(ddof=1) / 3**0.5)
    expected = 0.5 - t / (2 * (2 + t**2) ** 0.5)
    of_mean = np.array([0.1, 0.2, 0.4])
    assert p_value(of_mean * np.exp(logs), of_mean) == pytest.approx(expected)
    assert p_value(of_mean * np.exp(-logs), of_mean) == pytest.approx(1 - expected)


def test_p_values_of_edge_cases() -> None:
    assert math.isnan(p_value([0.1], [0.1]))
    assert math.isnan(p_value([0.1, 0.2], [0.1]))
    assert p_value([0.1, math.nan], [0.1, 0.2]) == 0
    assert p_value([0.1, 0.2], [0.1, 0.2]) == 1


def runs_of(method: str, factor: float, sent: float, optimizer: str = "sgd") -> list[dict]:
    """Five seeds whose losses are `factor` times those of the mean, with a small spread."""
    return [
        {
            "kind": "run",
            "optimizer": optimizer,
            "method": method,
            "seed": seed,
            "learning_rate": 0.1,
            "test_loss": (0.2 + 0.03 * seed) * factor * (1 + 0.01 * (-1) ** seed * (factor != 1)),
            "test_accuracy": 0.9,
            "train_loss": 0.01,
            "bytes_per_step": sent,
            "compression_error": 0.1,
        }
        for seed in range(5)
    ]


def trials_of(method: str, *rates: float) -> list[dict]:
    return [
        {
            "kind": "tuning",
            "optimizer": "sgd",
            "method": method,
            "seed": 5,
            "learning_rate": rate,
            "validation_loss": abs(rate - 0.1),
        }
        for rate in rates
    ]


SYNTHETIC = [
    ("mean", 1, 100),
    ("global_qsgd:8", 1.001, 25),
    ("qsgd", 1.001, 100),
    ("sign_sgd", 2, 3),
    ("top_1_percent", 4, 8),
]


def synthetic() -> list[Row]:
    runs = itertools.chain(*(runs_of(*each) for each in SYNTHETIC))
    return summarize(
        runs, [*trials_of("mean", 0.01, 0.1, 1.0), *trials_of("sign_sgd", 0.1, 0.3, 1.0)]
    )


def test_losers_are_significantly_above_the_mean() -> None:
    rows = {row.method: row for row in synthetic()}
    assert {name for name, row in rows.items() if row.loses} == {"sign_sgd", "top_1_percent"}
    assert {name for name, row in rows.items() if not row.saves} == {"mean", "qsgd"}
    assert [name for name, row in rows.items() if row.at_edge] == ["sign_sgd"]
    assert rows["sign_sgd"].loss_ratio == pytest.approx(2, rel=0.01)
    assert rows["sign_sgd"].bytes_ratio == pytest.approx(0.03)


def test_the_sentence_names_losers_their_reasons_and_what_saves_nothing() -> None:
    losers, savings = report.describe_findings(synthetic()).split(" save nothing")
    assert losers.startswith("2 of 4 methods lose to `mean` in loss.")
    for name, kind in (("sign_sgd (2.00", "signs"), ("top_1_percent (4.01", "biased")):
        method, ratio = name.split(" ")
        assert f"`{method}` {ratio} times): {report.REASONS[kind]}." in losers
    assert losers.endswith("In bytes `qsgd`")
    assert "`global_qsgd:8` (0.250; 1.00 times)" in savings
    assert savings.endswith("another rate may do better: `sign_sgd`.")


def test_no_method_is_judged_without_the_mean() -> None:
    rows = summarize(runs_of("sign_sgd", 2, 3), [])
    assert not rows[0].loses and "None is judged" in report.describe_findings(rows)


def test_a_diverged_method_loses_and_has_no_spread() -> None:
    diverged = [run | {"test_loss": math.nan} for run in runs_of("qsgd", 1, 1)]
    _, row = summarize([*runs_of("mean", 1, 1), *diverged], [])
    assert row.loses and math.isnan(row.test_loss_sd)


def test_optimizers_are_judged_separately() -> None:
    runs = [
        *runs_of("mean", 1, 1),
        *runs_of("qsgd", 2, 1),
        *runs_of("mean", 1, 1, "adam"),
        *runs_of("qsgd", 0.5, 1, "adam"),
    ]
    assert [row.loses for row in summarize(runs, [])] == [False, True, False, False]


def test_the_preset_is_every_method_and_no_option_does_nothing() -> None:
    assert Survey().methods == ("all",) and Survey().learning_rates
    assert issubclass(Survey, Compare) and Compare().learning_rates is None
    assert {parse_variant(label).method for label in ALL_LABELS} == set(METHODS)


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.name)
def test_the_readme_of_a_record_matches_its_metrics(record: Path) -> None:
    settings = json.loads((record / "config.json").read_text(encoding="utf-8"))
    assert settings["finished"]
    rows = summarize(read_metrics(record, "run"), read_metrics(record, "tuning"))
    assert {row.method for row in rows} >= set(settings["methods"]) >= {"mean"}
    readme = (record / "README.md").read_text(encoding="utf-8")
    assert report.describe_findings(rows) in readme and survey_table.to_markdown(rows) in readme
    with (record / "table.csv").open(encoding="utf-8") as file:
        table = {(line["optimizer"], line["method"]): line for line in csv.DictReader(file)}
    for row in rows:
        line = table[row.optimizer, row.method]
        assert float(line["test_loss"]) == pytest.approx(row.test_loss)
        assert line["loses"] == str(row.p_value < SIGNIFICANCE and row.method != "mean")
