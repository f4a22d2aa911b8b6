"""Time to a loss: steps to the target, seconds on links, resumption, frameworks."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.lab.network import Link
from experiments.lab.peers import has_torch
from experiments.studies import loss as study
from experiments.studies.loss import LOSS, LossConfig, confirmed, inputs, seconds_to_target
from experiments.study.record import make_row
from experiments.study.run import analyze, main
from tests.experiments.studies.test_lab import in_the_lab

LINKS = {"unshaped": 1.0, "1gbit": 2.0, "200mbit": 4.0}
# Seconds of a step on unshaped links, and the held-out losses after 10, 20, ... steps.
METHODS: Mapping[str, tuple[float, tuple[float, ...]]] = {
    "mean": (0.1, (5.0, 4.0, 3.0, 2.0, 1.0, 0.9, 0.8)),
    "power_sgd_rank_1_start_2": (0.01, (5.0, 4.5, 3.0, 2.0, 1.5)),
    "power_sgd_rank_4_start_2": (0.001, (5.0, 4.5, 4.0, 3.5, 3.0)),  # It does not reach the target.
    "ef_top_1_percent": (0.001, (5.0, 1.0, math.nan)),  # It diverges.
    "ddp": (0.1, (5.0, 4.0, 3.0, 2.0, 1.0, 0.9, 0.8)),
    "ddp_power_sgd_1": (0.02, (5.0, 4.0, 2.5, 1.5, 1.2)),
    "ddp_power_sgd_1_kept_memory": (0.015, ()),
}


def rows() -> list[dict[str, Any]]:
    found = []
    for seed in (0, 1, 2):
        for link, factor in LINKS.items():
            for method, (seconds, losses) in METHODS.items():
                keys = {"link": link, "method": method, "seed": seed}
                values: dict[str, Any] = {
                    "milliseconds": 1e3 * factor * seconds * (1 + 0.01 * seed),
                    "control": 50.0, "is_steady": True, "rejected": 0, "steps": 4, "sent": 1e6,
                }  # fmt: skip
                if link != "unshaped":
                    values["megabits"] = 1000.0 if link == "1gbit" else 200.0
                elif losses:
                    steps = [10 * (n + 1) for n in range(len(losses))]
                    for step, loss in zip(steps, losses, strict=True):
                        point = {"step": step, "held_out": loss * (1 + 0.001 * seed)}
                        found.append(make_row("point", keys, point))
                    values |= {"held_out": losses[-1], "trained_seconds": 1.0}
                    keys["learning_rate"] = 0.001
                if (link, method, seed) == ("200mbit", "power_sgd_rank_1_start_2", 2):
                    keys |= {"learning_rate": 0.001, "confirmed_steps": 40}
                    values |= {"confirmed_seconds": 1.7, "confirmed_loss": 2.0}
                found.append(make_row("run", keys, values))
    return found


def test_seconds_are_steps_to_the_target_times_step_time() -> None:
    lines = {line.where: line.group for line in analyze(LOSS, LossConfig(), rows(), "").lines}
    # The mean over seeds of the loss of ddp at 60 % of 70 steps is 2 * 1.001. Seed 0 is at 2.0
    # after 40 steps and at 3.0 after 30: 2.002 is between them.
    assert lines["unshaped, ddp"].runs[0]["target"] == pytest.approx(2.002)
    steps = lines["unshaped, ddp"].by_seed("step_to_target")
    assert steps == pytest.approx({0: 39.98, 1: 40, 2: 40 + 10 * 0.002 / 1.002})
    for link, factor in LINKS.items():
        seconds = lines[f"{link}, ddp"].by_seed("seconds_to_target")
        assert seconds[1] == pytest.approx(40 * 0.101 * factor)
    hook = lines["200mbit, ddp_power_sgd_1"].by_seed("step_to_target")
    assert hook[0] == pytest.approx(30 + 10 * (2.5 - 2.002) / (2.5 - 1.5))
    kept = lines["200mbit, ddp_power_sgd_1_kept_memory"]
    assert kept.by_seed("step_to_target") == hook
    assert kept.by_seed("seconds_to_target")[0] == pytest.approx(hook[0] * 0.06)
    estimate = seconds_to_target(lines["unshaped, ddp"])
    assert estimate is not None and estimate.low < estimate.mean < estimate.high


def test_a_method_that_does_not_reach_the_target_takes_forever() -> None:
    lines = {line.where: line for line in analyze(LOSS, LossConfig(), rows(), "").lines}
    found = confirmed(lines["200mbit, power_sgd_rank_1_start_2"].group)
    assert found == pytest.approx(1.7 / (40 * 0.04 * 1.01))
    for poor in ("power_sgd_rank_4_start_2", "ef_top_1_percent"):
        line = lines[f"200mbit, {poor}"]
        assert line["reached"] == "0/3" and line["seconds_to_target"].mean == math.inf


def test_without_pytorch_the_target_is_that_of_the_mean() -> None:
    ours = [row for row in rows() if not row["method"].startswith("ddp")]
    results = analyze(LOSS, LossConfig(), ours, "")
    assert results.lines[0].group.runs[0]["target"] == pytest.approx(2.002)
    assert "PyTorch is not installed" in "".join(LOSS.prose(results))
    never = [row for row in rows() if row["method"] not in ("mean", "power_sgd_rank_1_start_2")]
    claimed = analyze(LOSS, LossConfig(), never, "").judgements[0]
    assert "Outcome: not tested in 2 of 2 settings." in claimed.markdown


def test_the_steps_of_a_confirmation_are_those_to_the_target() -> None:
    first, second = "power_sgd_rank_1_start_2", "power_sgd_rank_4_start_2"
    config = LossConfig(bandwidth=("1gbit", "200mbit"), confirm=(first, second))

    def found(method: str, link: str = "200mbit", seed: int = 2) -> Mapping[str, Any]:
        return inputs(config, rows(), {"link": link, "method": method}, seed)

    assert found(first) == {"learning_rate": 0.001, "confirmed_steps": 41}
    assert found(second) == {"learning_rate": 0.001, "confirmed_steps": 120}
    assert found("ddp") == found(first, seed=1) == found("mean", "1gbit") == {}


class FakeLab:
    """Answers as the lab does, without processes."""

    def __init__(self) -> None:
        self.network = self
        self.trained: list[Mapping[str, Any]] = []

    def shape(self, link: Link) -> None:
        pass

    def group(self, method: str) -> "FakeLab":
        return self

    def ask(self, command: str, seconds: float, **arguments: Any) -> list[dict[str, Any]]:
        self.trained.append(arguments)
        every, rate = arguments["evaluate_every"], arguments["learning_rate"]
        steps = [*range(0, arguments["steps"] + 1, every)]
        worse = abs(math.log(rate / 0.001)) + 0.001 * arguments["seed"]
        losses = [5 - 0.02 * step + worse for step in steps]
        return [{"steps": steps, "evaluated": losses, "seconds": [0.1 * step for step in steps]}]

    def time_steps(self, method: str, link: Link, steps: int) -> dict[str, Any]:
        return {"milliseconds": 100.0, "control": 50.0, "is_steady": True, "rejected": 0,
                "steps": 4, "sent": 1e6, "loss": 1.0}  # fmt: skip


@pytest.mark.slow
def test_trials_and_the_confirmation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = FakeLab()
    monkeypatch.setattr(study, "lab_of", lambda config: lab)
    config = LossConfig(
        methods=("mean", "power_sgd_rank_4_start_2"), bandwidth=("200mbit",), seeds=2, steps=100,
        records=str(tmp_path),
    )  # fmt: skip
    assert main(LOSS, config) == 0
    assert len(lab.trained) == 2 * (4 + 2) + 1  # Trials and seeds of both methods.
    trials = [each for each in lab.trained if each.get("split") == "validation"]
    assert {(each["seed"], each["steps"]) for each in trials} == {(2, 40)}
    assert {each["learning_rate"] for each in lab.trained if each["split"] == "held_out"} == {0.001}
    (folder,) = tmp_path.iterdir()
    assert "`power_sgd_rank_4_start_2` took 6.1 s for 61 steps on 200mbit" in (
        folder / "README.md"
    ).read_text(encoding="utf-8")


TRAINING = """
import json
from experiments.lab.processes import Group

Network(2)
curves = {}
for port, (framework, methods) in enumerate(METHODS.items()):
    group = Group(framework, 2, {"model": "transformer", "optimizer": "adam"}, port=1234 + port)
    for method in methods:
        for split in ("held_out", "validation"):
            curves[method, split] = group.ask(
                "train", method=method, learning_rate=1e-3, steps=4, seed=3, evaluate_every=2,
                split=split)
print(json.dumps([[*key, curve] for key, curve in curves.items()]))
"""


@pytest.mark.slow
def test_both_frameworks_train_the_same() -> None:
    if not has_torch():
        pytest.skip("no PyTorch")
    methods = {"jax_worker": ["mean", "mean_bfloat16"], "torch_worker": ["ddp"]}
    found = json.loads(in_the_lab(f"METHODS = {methods}\n{TRAINING}"))
    curves = {(method, split): curve for method, split, curve in found}
    for split in ("held_out", "validation"):
        ours, theirs = (curves[method, split] for method in ("mean", "ddp"))
        for worker in ours:
            assert worker["evaluated"] == ours[0]["evaluated"]
        np.testing.assert_allclose(ours[0]["evaluated"], theirs[0]["evaluated"], rtol=1e-4)
        losses = np.mean([worker["losses"] for worker in theirs], axis=0)
        np.testing.assert_allclose(ours[0]["losses"], losses, rtol=1e-4)
        rounded = curves["mean_bfloat16", split][0]["evaluated"]
        assert rounded != ours[0]["evaluated"]
        np.testing.assert_allclose(rounded, ours[0]["evaluated"], rtol=1e-2)
    assert curves["mean", "held_out"][0]["losses"] == curves["mean", "validation"][0]["losses"]
    assert (
        curves["mean", "held_out"][0]["evaluated"] != curves["mean", "validation"][0]["evaluated"]
    )
