"""The training loop, and what trains a method at any rate: workers, trials, stages and data."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from experiments import trainer
from experiments.errors import ExperimentError
from experiments.methods import ALL_LABELS, WARM_UP_STEPS, parse_method
from experiments.studies.survey import Survey
from experiments.tasks.task import Task
from experiments.trainer import Program, make_mesh, make_program, make_trainer, train
from tests.slow import slow


@pytest.fixture(scope="module")
def task() -> Task:
    return Task("digits")


def program_of(
    task: Task, label: str, workers: int = 2, batch: int = 32, *, simulated: bool = True
) -> Program:
    method, mesh = parse_method(label), make_mesh(workers)
    return make_program(task, method, "sgd", 0.05, batch, mesh, simulated=simulated)


def test_held_out_examples_are_not_trained_on(task: Task) -> None:
    held_out, whole, part = task.hold_out(), task.dataset, task.hold_out().dataset

    def rows(*parts: np.ndarray) -> list[bytes]:
        return sorted(image.tobytes() for image in np.concatenate(parts))

    assert rows(part.train_inputs, part.test_inputs) == rows(whole.train_inputs)
    batches = itertools.islice(program_of(task, "mean").batches(held_out, 0), 80)
    assert {*rows(*(inputs for inputs, _ in batches))} == {*rows(part.train_inputs)}


@pytest.mark.slow
def test_the_simulation_agrees_with_devices_and_a_run_logs_steps(task: Task) -> None:
    ends = []
    for simulated in (False, True):
        program = program_of(task, "global_qsgd:8", simulated=simulated)
        *steps, end = train(program, seed=0, steps=25, log_every=10)
        assert [row["step"] for row in steps] == [10, 20, 25]
        assert steps[-1]["bytes_sent"] == 25 * end["bytes_per_step"] > 0
        assert end["train_loss"] == steps[-1]["train_loss"] < steps[0]["train_loss"]
        assert 0.001 < end["compression_error"] < 0.5
        ends.append(end)
    for name in ("train_loss", "test_loss", "compression_error", "bytes_per_step"):
        assert ends[0][name] == pytest.approx(ends[1][name], rel=1e-3), name
    *_, again = train(program, seed=0, steps=25, log_every=10)
    *_, faster = train(program._replace(learning_rate=0.5), seed=0, steps=25, log_every=10)
    assert again["train_loss"] == end["train_loss"]
    assert abs(faster["train_loss"] - end["train_loss"]) > 0.01


def test_bytes_are_those_of_the_stage_that_a_step_takes(task: Task) -> None:
    labels = "warm_up", "ef_top_10_percent", "ef_top_1_percent"
    warmup, *stages = (program_of(task, label) for label in labels)
    _, (observed, _) = warmup.first(0, 0.05)
    for stage, alone in zip((1, 3), stages, strict=True):
        inner = observed.inner._replace(step=np.int32(stage * WARM_UP_STEPS))
        found = warmup.bytes_of_step((observed._replace(inner=inner),))
        assert found == alone.account.bytes_per_worker


@pytest.mark.parametrize("label", [m if m == "global_qsgd:8" else slow(m) for m in ALL_LABELS])
def test_every_method_can_be_accounted(task: Task, label: str) -> None:
    """And the optimizer has no momentum if the aggregator has."""
    program = program_of(task, label)
    assert program.account.bytes_per_worker > 0
    momentum = program.first(0, 0.05)[1][1].inner_state
    assert bool(getattr(momentum[0], "trace", None)) != program.method.has_momentum


def test_trials_are_shorter_and_do_not_train_on_the_validation_set(
    monkeypatch: pytest.MonkeyPatch, task: Task
) -> None:
    seen: list[tuple] = []

    def fake(program: Program, seed: int, steps: int, log_every: int) -> list[dict[str, Any]]:
        examples = len(program.task.dataset.train_inputs)
        seen.append((program.learning_rate, seed, steps, log_every, examples))
        return [{"step": steps}, {"test_loss": 1.0, "test_accuracy": 0.5}]

    monkeypatch.setattr(trainer, "train", fake)
    config, steps = Survey(batch=32, devices=2), {"steps": 7, "log_every": 2, "trial_steps": 3}
    run = make_trainer(config, "signum", "sgd", task, **steps, simulated=True)
    parameters = {"learning_rate": 0.2}
    trial = run({}, 5, parameters | {"momentum": 0.8}, validation=True)
    assert [*trial] == [{"validation_loss": 1.0, "validation_accuracy": 0.5}]
    assert next(run({}, 0, parameters, validation=False)) == {"step": 7}
    assert [*run({}, 0, {}, validation=False)]
    assert seen == [(0.2, 5, 3, 3, 1150), (0.2, 0, 7, 2, 1437), (0.05, 0, 7, 2, 1437)]
    with pytest.raises(ExperimentError, match="1200 exceeds the 1150 training examples that rem"):
        make_trainer(Survey(batch=1200, devices=2), "mean", "sgd", task, **steps)


@pytest.mark.slow
@pytest.mark.parametrize("poisoned", [True, False])
def test_a_run_ends_at_the_worker_whose_data_is_not_finite(task: Task, poisoned: bool) -> None:
    def batches(task: Task, seed: int) -> Iterator[Any]:
        for number, (inputs, labels) in enumerate(task.batches(seed, 64), 1):
            inputs = inputs.astype(np.float32)
            if poisoned and number == 3:
                inputs[40] = np.nan
            yield inputs, labels

    program = program_of(task, "mean", 4, 64, simulated=False)._replace(batches=batches)
    steps = train(program, 0, 4, 1, make_mesh(4))
    if not poisoned:
        assert len([*steps]) == 5
        return
    assert [next(steps)["step"], next(steps)["step"]] == [1, 2]
    message = r"loss of step 3 is not finite: worker 2 of 4: NaN in the loss .*\. Correct the data"
    with pytest.raises(ExperimentError, match=message):
        next(steps)
