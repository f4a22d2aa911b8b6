"""Time to a loss: steps to the target, seconds on links, resumption, frameworks."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.lab.methods import find
from experiments.lab.network import Link
from experiments.lab.peers import has_torch
from experiments.studies import loss as study
from experiments.studies.loss import (
    LOSS,
    OF_ADVICE,
    LossConfig,
    confirmed,
    inputs,
    seconds_to_target,
    steps_to,
)
from experiments.study.record import make_row, of_kind, read
from experiments.study.run import analyze, main
from jaxcomm.perf._recommended import recommended
from tests.experiments.studies.test_lab import in_the_lab

LINKS = {"unshaped": 1.0, "1gbit": 2.0, "200mbit": 4.0}
# Seconds of a step on unshaped links, and the held-out losses after 10, 20, ... steps.
METHODS: Mapping[str, tuple[float, tuple[float, ...]]] = {
    "mean": (0.1, (5.0, 4.0, 3.0, 1.5)),
    "power_sgd_rank_1_start_2": (0.01, (5.0, 4.5, 3.0, 1.0)),
    "power_sgd_rank_4_start_2": (0.001, (5.0, 4.5, 4.0, 3.5, 3.0)),  # It does not reach the target.
    "ef_top_1_percent": (0.001, (5.0, 3.0, math.nan)),  # It diverges.
    "ddp": (0.1, (5.0, 4.0, 3.0, 1.5)),
    "ddp_power_sgd_1": (0.02, (5.0, 4.0, 2.5, 1.5)),
    "ddp_power_sgd_1_kept_memory": (0.015, ()),
}
TARGET, CONTROL = 2.0, 50.0


def rows() -> list[dict[str, Any]]:
    found = [
        make_row("fact", {}, {"link": link, "advised": "power_sgd_rank_1_start_2", "control": 50.0})
        for link in ("1gbit", "200mbit")
    ]
    for seed in (0, 1, 2):
        for link, factor in LINKS.items():
            for method, (seconds, losses) in METHODS.items():
                keys = {"link": link, "method": method, "seed": seed}
                values: dict[str, Any] = {
                    "milliseconds": 1e3 * factor * seconds * (1 + 0.01 * seed), "target": TARGET,
                    "control": CONTROL, "is_steady": True, "rejected": 0, "steps": 4, "sent": 1e6,
                }  # fmt: skip
                if link == "unshaped" and losses:
                    steps = [10 * (n + 1) for n in range(len(losses))]
                    for step, loss in zip(steps, losses, strict=True):
                        point = {"step": step, "held_out": loss}
                        found.append(make_row("point", keys, point))
                    values |= {"held_out": losses[-1], "trained_seconds": 1.0}
                    keys |= {"learning_rate": 0.001, "momentum": 0.9}
                if (link, method, seed) == ("200mbit", "power_sgd_rank_1_start_2", 2):
                    keys |= {"learning_rate": 0.001, "momentum": 0.9, "confirmed_steps": 40}
                    values |= {"confirmed_seconds": 3.0, "confirmed_loss": 2.0}
                found.append(make_row("run", keys, values))
    return found


def test_steps_to_a_loss_are_interpolated() -> None:
    curve = {"steps": [0, 10, 20], "evaluated": [5.0, 4.0, 2.0]}
    assert steps_to(curve, 3.0) == 15 and steps_to(curve, 2.0) == 20
    assert steps_to(curve, 1.0) == 40  # Worse than what is reached, by how far it is.
    assert math.isnan(steps_to({"steps": [0, 10], "evaluated": [5.0, math.inf]}, 3.0))


def test_seconds_are_steps_to_the_target_times_step_time() -> None:
    lines = {line.where: line.group for line in analyze(LOSS, LossConfig(), rows(), "").lines}
    mean = 40 - 10 * 0.5 / 1.5
    for link, factor in LINKS.items():
        for name in ("mean", "ddp"):
            assert lines[f"{link}, {name}"].by_seed("step_to_target") == pytest.approx(
                dict.fromkeys((0, 1, 2), mean)
            )
            seconds = lines[f"{link}, {name}"].by_seed("seconds_to_target")
            assert seconds[1] == pytest.approx(mean * 0.101 * factor)
        # The first two steps are those of the exact mean of the same framework.
        ours = lines[f"{link}, power_sgd_rank_1_start_2"].by_seed("seconds_to_target")
        assert ours[0] == pytest.approx(factor * (33 * 0.01 + 2 * 0.1))
        kept = lines[f"{link}, ddp_power_sgd_1_kept_memory"].by_seed("seconds_to_target")
        assert kept[0] == pytest.approx(factor * (33 * 0.015 + 2 * 0.1))
        limit = lines[f"{link}, limit"].by_seed("seconds_to_target")
        assert limit[2] == pytest.approx(mean * CONTROL / 1e3)
    estimate = seconds_to_target(lines["unshaped, ddp"])
    assert estimate is not None and estimate.low < estimate.mean < estimate.high
    assert "unshaped, advised" not in lines
    for link in ("1gbit", "200mbit"):
        named = lines[f"{link}, advised"].by_seed("seconds_to_target")
        own = lines[f"{link}, power_sgd_rank_1_start_2"]
        assert named == own.by_seed("seconds_to_target")


def test_a_method_that_does_not_reach_the_target_takes_forever() -> None:
    lines = {line.where: line for line in analyze(LOSS, LossConfig(), rows(), "").lines}
    found = confirmed(lines["200mbit, power_sgd_rank_1_start_2"].group)
    assert found == pytest.approx(3.0 / (1.01 * (38 * 0.04 + 2 * 0.4)))
    for poor in ("power_sgd_rank_4_start_2", "ef_top_1_percent"):
        line = lines[f"200mbit, {poor}"]
        assert line["reached"] == "0/3" and line["seconds_to_target"].mean == math.inf


def test_claims_compare_what_was_advised_with_the_fastest_of_others() -> None:
    results = analyze(LOSS, LossConfig(), rows(), "")
    judged = {each.claim.text: each.markdown for each in results.judgements}
    texts = [*judged.values()]
    assert "power_sgd_rank_1_start_2 against ddp_power_sgd_1_kept_memory" in texts[0]
    assert "unshaped: nothing is advised" in texts[0] and "unshaped" not in texts[1]
    assert "against ddp:" in texts[2] and "against limit:" in texts[5]
    assert "power_sgd_rank_1_start_2 against power_sgd_rank_1_start_2" in texts[3]
    assert "unshaped, ddp: step_to_target ratio 1 " in texts[6]
    assert "`advised` is the method" in "".join(LOSS.prose(results))


def test_every_method_of_the_advice_is_raced_under_a_name() -> None:
    assert {method.code for method in recommended("data", 4)} == OF_ADVICE.keys()
    for name in OF_ADVICE.values():
        find(name)


def test_the_steps_of_a_confirmation_are_those_to_the_target() -> None:
    first, second = "power_sgd_rank_1_start_2", "power_sgd_rank_4_start_2"
    config = LossConfig(bandwidth=("1gbit", "200mbit"), confirm=(first, second), seeds=3)

    def found(method: str, link: str = "200mbit", seed: int = 2) -> Mapping[str, Any]:
        return inputs(config, rows(), {"link": link, "method": method}, seed)

    tuned = {"learning_rate": 0.001, "momentum": 0.9}
    assert found(first) == {**tuned, "confirmed_steps": 35}
    assert found(second) == {**tuned, "confirmed_steps": 160}
    assert found("ddp") == found(first, seed=1) == found("mean", "1gbit") == {}


class FakeLab:
    """Answers as the lab does, without processes."""

    def __init__(self) -> None:
        self.network = self
        self.trained: list[Mapping[str, Any]] = []

    def shape(self, link: Link) -> None:
        pass

    def control(self) -> float:
        return CONTROL

    def group(self, method: str) -> "FakeLab":
        return self

    def ask(self, command: str, seconds: float, **arguments: Any) -> list[dict[str, Any]]:
        self.trained.append(arguments)
        every, rate = arguments["evaluate_every"], arguments["learning_rate"]
        steps = [*range(0, arguments["steps"] + 1, every)]
        worse = abs(math.log(rate / 0.0007)) + 0.001 * arguments["seed"]
        losses = [5 - 0.02 * step + worse for step in steps]
        count = 1 + sum(loss > arguments["until"] for loss in losses)
        return [
            {
                "steps": steps[:count],
                "evaluated": losses[:count],
                "seconds": [0.1 * step for step in steps[:count]],
            }
        ]

    def time_steps(self, method: str, link: Link, steps: int) -> dict[str, Any]:
        return {"milliseconds": 100.0, "control": 50.0, "is_steady": True, "rejected": 0,
                "steps": 4, "sent": 1e6, "loss": 1.0}  # fmt: skip


@pytest.mark.slow
def test_trials_and_the_confirmation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = FakeLab()
    monkeypatch.setattr(study, "lab_of", lambda config: lab)
    config = LossConfig(
        methods=("mean", "power_sgd_rank_4_start_2"), bandwidth=("200mbit",), seeds=2, target=3.5,
        confirm=("power_sgd_rank_4_start_2",),
        validation_target=3.6, records=str(tmp_path),
    )  # fmt: skip
    assert main(LOSS, config) == 0
    assert len(lab.trained) == 2 * (5 + 2) + 1  # Trials and seeds of both methods.
    trials = [each for each in lab.trained if each["split"] == "validation"]
    assert {(each["seed"], each["until"]) for each in trials} == {(2, 3.6)}
    trained = [each for each in lab.trained if each["split"] == "held_out"]
    assert {(each["learning_rate"], each["momentum"]) for each in trained} == {(0.0007, 0.9)}
    (folder,) = tmp_path.iterdir()
    assert "`power_sgd_rank_4_start_2` took 7.6 s for 76 steps on 200mbit" in (
        folder / "README.md"
    ).read_text(encoding="utf-8")
    # More links and methods add to the record: no training is repeated.
    before = len(lab.trained)
    more = LossConfig(
        methods=(*config.methods, "mean_bfloat16"), bandwidth=("200mbit", "1gbit"),
        resume=str(folder),
    )  # fmt: skip
    assert main(LOSS, more) == 0
    assert {each["method"] for each in lab.trained[before:]} == {"mean_bfloat16"}
    links = [row["link"] for row in of_kind(read(folder), "fact")]
    assert links == ["unshaped", "200mbit", "1gbit"]  # What is advised for each.


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
