"""The comparison of stragglers: clocks, claim and record."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.cli.configs import Stragglers
from experiments.cli.errors import ExperimentError
from experiments.methods.stragglers import BLOCKING_FORM, SPEEDS, STRATEGIES, WORKERS
from experiments.studies.stragglers import run as stragglers
from experiments.studies.stragglers.report import verdict
from experiments.studies.stragglers.table import add_times, gains, summarize
from experiments.study.figures import draw
from experiments.study.record import read_metrics
from experiments.training import timeline as straggler_timeline
from experiments.training.timeline import Link, timeline

RECORDS = sorted((Path(stragglers.__file__).parents[2] / "records").glob("*_stragglers*"))
LINK = Link(all_reduce=0.004, message=0.001)
CONFIG = Stragglers(steps=24, minibatch_seconds=0.01)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_strategies_finish_the_same_number_of_mini_batches(strategy: str) -> None:
    found = timeline(STRATEGIES[strategy], LINK, "3:1", 0, CONFIG)
    wanted = CONFIG.steps * WORKERS * CONFIG.minibatches
    chunk = STRATEGIES[strategy].chunk(CONFIG)
    last = found.window.finished[-chunk:].sum()
    assert wanted <= found.window.finished.sum() < wanted + last
    assert len(found.seconds) % chunk == 0 and (np.diff(found.seconds) > 0).all()
    np.testing.assert_array_equal(found.idle, 0)


def test_clocks_by_hand() -> None:
    seconds = {
        name: timeline(STRATEGIES[name], LINK, "3:1", 0, CONFIG).seconds for name in STRATEGIES
    }
    # Twelve times 10 ms on slow workers, or four times on fast ones, plus communication.
    np.testing.assert_allclose(seconds["synchronous"][:2], [0.124, 0.248], rtol=1e-5)
    np.testing.assert_allclose(seconds["non_blocking"][:2], [0.044, 0.088], rtol=1e-5)
    # Workers average after eight mini-batches of 30 ms.
    np.testing.assert_allclose(seconds["local_sgd"][[6, 7]], [0.21, 0.244], rtol=1e-5)
    # The busiest worker of the graph has five neighbors and sends to each.
    np.testing.assert_allclose(seconds["non_blocking_dpsgd"][0], 0.045, rtol=1e-5)
    assert seconds["matcha"][-1] < seconds["dpsgd"][-1] < seconds["synchronous"][-1] * 1.05


def test_too_few_mini_batches_per_window_are_an_error(monkeypatch: Any) -> None:
    one_of_eight = dataclasses.replace(CONFIG, minibatches=1)
    monkeypatch.setattr(straggler_timeline, "MAX_WINDOWS_FACTOR", 4)
    with pytest.raises(ExperimentError, match="workers finish too few in a window"):
        timeline(STRATEGIES["non_blocking"], LINK, "exponential", 0, one_of_eight)


def runs(times: dict[str, float]) -> list[dict]:
    return [
        {"dataset": "digits", "speeds": "3:1", "strategy": strategy, "seed": seed,
         "seconds_to_loss": seconds * (1 + seed), "seconds": 10.0, "steps": 5, "minibatches": 40,
         "idle": 0, "loss": 0.25, "learning_rate": 0.1, "test_accuracy": 0.9}
        for strategy, seconds in times.items() for seed in (0, 1)
    ]  # fmt: skip


def test_gains_are_ratios_of_times() -> None:
    found = {gain.strategy: gain for gain in gains(runs(
        {"synchronous": 3.0, "dpsgd": 2.0, "non_blocking": 2.0, "non_blocking_dpsgd": 4.0}
    ))}  # fmt: skip
    assert found["non_blocking"].ratio == 1.5 and found["non_blocking"].ratio_sd == 0
    assert "1.50 ± 0.00 times faster" in found["non_blocking"].sentence
    assert "slower" in found["non_blocking_dpsgd"].sentence
    assert "0.50 times at worst" in verdict([*found.values()])
    unknown = gains(runs({"dpsgd": math.nan, "non_blocking_dpsgd": 1.0}))
    assert "diverges" in unknown[0].sentence
    assert "not put to the test" in verdict(unknown)
    (row,) = summarize(runs({"dpsgd": math.nan}))
    assert row.reached == 0 and math.isnan(row.seconds_to_loss)


def test_the_target_is_the_lowest_loss_that_all_reach() -> None:
    names = {"dataset": "digits", "speeds": "3:1", "seed": 0}
    losses = {"a": [2.0, 1.0, 0.5], "b": [1.5, 0.8, 0.9], "c": [1.0, math.nan, math.nan]}
    curves = [
        {**names, "strategy": strategy, "seconds": 1.0 + t, "train_loss": loss}
        for strategy, of_run in losses.items() for t, loss in enumerate(of_run)
    ]  # fmt: skip
    ends = [{**names, "strategy": s, "train_loss": each[-1]} for s, each in losses.items()]
    found = {run["strategy"]: run for run in add_times(curves, ends)}
    assert {run["loss"] for run in found.values()} == {0.8}
    assert (found["a"]["seconds_to_loss"], found["b"]["seconds_to_loss"]) == (3, 2)
    assert math.isnan(found["c"]["seconds_to_loss"])


def test_a_short_comparison_leaves_a_record(tmp_path: Path) -> None:
    config = Stragglers(
        datasets=("digits",),
        speeds=("3:1",),
        strategies=("non_blocking_late",),
        learning_rates=(0.2,),
        steps=2,
        seeds=2,
        log_every=1,
        records=str(tmp_path),
    )
    assert stragglers.main(config) == 0
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "config.json").read_text())["finished"]
    rows, ended = (read_metrics(folder, kind) for kind in ("straggler", "straggler_run"))
    assert {row["strategy"] for row in rows} == {run["strategy"] for run in ended}
    assert [run["seed"] for run in ended] == [0, 1]
    assert ended[0]["steps"] > 2 and ended[0]["minibatches"] >= 2 * WORKERS * 4
    text = (folder / "README.md").read_text()
    assert "The claim was not put to the test" in text and "| non_blocking_late |" in text
    assert draw(folder).stat().st_size > 10_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategies": ("foo",)}, "--strategies must be of synchronous"),
        ({"speeds": ("foo",)}, "--speeds must be of 3:1"),
        ({"minibatch_size": 1000}, "--minibatch-size 1000 exceeds the"),
    ],
)
def test_mistakes(options: dict, message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        stragglers.main(Stragglers(datasets=("digits",), record="none", **options))


@pytest.mark.parametrize("folder", RECORDS, ids=lambda folder: folder.name)
def test_the_readme_matches_the_metrics(folder: Path) -> None:
    ended = add_times(*(read_metrics(folder, kind) for kind in ("straggler", "straggler_run")))
    text = (folder / "README.md").read_text(encoding="utf-8")
    for gain in gains(ended):
        assert gain.sentence in text
    assert verdict(gains(ended)) in text
    assert {run["strategy"] for run in ended} == {*STRATEGIES}
    assert {run["speeds"] for run in ended} == {*SPEEDS}
    assert len({run["seed"] for run in ended}) == 5
    assert {*BLOCKING_FORM} < {run["strategy"] for run in ended}
