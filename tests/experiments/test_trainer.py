"""What trains a method at any rate: simulated workers, held-out examples, stages and options."""

import itertools
import math
from typing import Any

import numpy as np
import pytest

from experiments.cli.errors import ExperimentError
from experiments.methods import METHODS, Variant, make_variant
from experiments.methods._sparsifiers import WARM_UP_STEPS
from experiments.studies.survey import Survey
from experiments.tasks.task import Task
from experiments.training import trainer
from experiments.training.train import Program, make_mesh, make_program, train
from jaxcomm.aggregation._warmup import WarmupState


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
    *_, faster = train(program._replace(learning_rate=0.5), seed=0, steps=6, log_every=3)
    assert abs(faster["train_loss"] - found["train_loss"]) > 0.01


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


CONFIG = Survey(batch=32, devices=2)


def test_trials_are_shorter_and_do_not_train_on_the_validation_set(
    monkeypatch: pytest.MonkeyPatch, task: Task
) -> None:
    seen: list[tuple] = []

    def fake(program: Program, seed: int, steps: int, log_every: int) -> list[dict[str, Any]]:
        examples = len(program.task.dataset.train_inputs)
        seen.append((program.learning_rate, seed, steps, log_every, examples))
        return [{"step": steps}, {"test_loss": 1.0, "test_accuracy": 0.5}]

    monkeypatch.setattr(trainer, "train", fake)
    run = trainer.make_trainer(
        CONFIG, "signum", "sgd", task, steps=7, log_every=2, trial_steps=3, simulated=True
    )
    parameters = {"learning_rate": 0.2}
    trial = run({}, 5, parameters | {"momentum": 0.8}, validation=True)
    assert [*trial] == [{"validation_loss": 1.0, "validation_accuracy": 0.5}]
    assert next(run({}, 0, parameters, validation=False)) == {"step": 7}
    assert [*run({}, 0, {}, validation=False)]
    assert seen == [(0.2, 5, 3, 3, 1150), (0.2, 0, 7, 2, 1437), (0.05, 0, 7, 2, 1437)]


@pytest.mark.slow
def test_the_options_of_a_method_are_used_and_votes_have_no_error(task: Task) -> None:
    run = trainer.make_trainer(CONFIG, "signum", "sgd", task, steps=2, log_every=2, simulated=True)
    ends = [
        [*run({}, 0, {"learning_rate": 0.01, **options}, validation=False)][-1]
        for options in ({}, {"momentum": 0.9}, {"momentum": 0.5})
    ]
    losses = [end["train_loss"] for end in ends]
    assert losses[0] == losses[1] != losses[2]
    assert all(math.isnan(end["compression_error"]) for end in ends)


def test_a_batch_that_trials_do_not_have_is_an_error_before_the_first_run(task: Task) -> None:
    config = Survey(batch=1200, devices=2)
    with pytest.raises(ExperimentError, match="1200 exceeds the 1150 training examples that rem"):
        trainer.make_trainer(config, "mean", "sgd", task, steps=1, log_every=1, trial_steps=1)
