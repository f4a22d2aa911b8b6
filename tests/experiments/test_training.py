"""The training loop and its metrics."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from experiments.cli.errors import ExperimentError
from experiments.methods import METHODS, make_variant, parse_variant
from experiments.tasks.task import Task
from experiments.training.finite import FiniteSteps
from experiments.training.train import make_mesh, make_program, train
from tests.slow import slow


@pytest.fixture(scope="module")
def task() -> Task:
    return Task("digits")


def test_batches_depend_on_the_seed_alone_and_cover_each_epoch(task: Task) -> None:
    def labels(seed: int) -> list[np.ndarray]:
        return [batch[1] for batch in itertools.islice(task.batches(seed, 479), 6)]

    np.testing.assert_array_equal(labels(3), labels(3))
    assert not np.array_equal(labels(3), labels(4))
    for epoch in (labels(3)[:3], labels(3)[3:]):
        np.testing.assert_array_equal(
            np.sort(np.concatenate(epoch)), np.sort(task.dataset.train_labels)
        )


def test_first_weights_depend_on_the_seed_alone(task: Task) -> None:
    first, same, other = (task.first_weights(seed) for seed in (0, 0, 1))
    leaves = zip(*map(jax.tree.leaves, (first, same, other)), strict=True)
    assert all(np.array_equal(a, b) for a, b, _ in leaves)
    kernel = first["Conv_0"]["kernel"]
    assert not np.array_equal(kernel, other["Conv_0"]["kernel"])
    assert 10_000 <= sum(leaf.size for leaf in jax.tree.leaves(first)) <= 30_000


def test_the_score_is_exact_over_the_whole_set(task: Task) -> None:
    params = task.first_weights(0)
    logits = np.asarray(task.model.apply({"params": params}, task.dataset.test_inputs), np.float64)
    labels = task.dataset.test_labels
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(labels)), labels]
    loss, accuracy = task.test_score(params)
    assert loss == pytest.approx(losses.mean(), rel=1e-5)
    assert accuracy == (logits.argmax(axis=1) == labels).mean()


@pytest.mark.slow
def test_a_run_logs_steps_and_then_itself(task: Task) -> None:
    program = make_program(task, make_variant("global_qsgd", 8), "sgd", 0.05, 64, make_mesh(4))
    *steps, last = train(program, seed=0, steps=25, log_every=10)
    assert [row["step"] for row in steps] == [10, 20, 25]
    assert steps[-1]["bytes_sent"] == 25 * last["bytes_per_step"]
    assert last["train_loss"] == steps[-1]["train_loss"] < steps[0]["train_loss"]
    assert 0.01 < last["compression_error"] < 0.5
    *_, again = train(program, seed=0, steps=25, log_every=10)
    assert again["train_loss"] == last["train_loss"]
    exact = make_program(task, make_variant("mean", None), "sgd", 0.05, 64, make_mesh(4))
    params, opt_state = exact.start(0)
    assert float(exact.compression_error(params, opt_state[0], next(task.batches(0, 64)))) == 0


# The others differ only in the codec; these differ in the structure of the step.
QUICK = {"global_qsgd", "warm_up"}


@pytest.mark.parametrize("method", [m if m in QUICK else slow(m) for m in METHODS])
def test_every_method_can_be_accounted(task: Task, method: str) -> None:
    program = make_program(task, make_variant(method, None), "sgd", 0.05, 64, make_mesh(2))
    assert program.account.bytes_per_worker > 0


def test_wrong_methods_batches_and_devices_are_errors(task: Task) -> None:
    with pytest.raises(ExperimentError, match="takes no bits"):
        parse_variant("mean:8")
    for batch, message in ((63, "not divisible by 2 workers"), (6400, "exceeds the 1437")):
        with pytest.raises(ExperimentError, match=message):
            make_program(task, make_variant("mean", None), "sgd", 0.05, batch, make_mesh(2))
    with pytest.raises(ExperimentError, match="--devices 1000 exceeds the"):
        make_mesh(1000)


@pytest.mark.slow
@pytest.mark.parametrize("poisoned", [True, False])
def test_a_run_ends_at_the_worker_whose_data_is_not_finite(task: Task, poisoned: bool) -> None:
    mesh = make_mesh(4)
    program = make_program(task, make_variant("mean", None), "sgd", 0.05, 64, mesh)

    def batches(task: Task, seed: int) -> Iterator[Any]:
        for number, (inputs, labels) in enumerate(task.batches(seed, 64), 1):
            inputs = inputs.astype(np.float32)
            if poisoned and number == 3:
                inputs[40] = np.nan
            yield inputs, labels

    steps = train(program._replace(batches=batches), 0, 4, 1, FiniteSteps(task.loss, mesh))
    if not poisoned:
        assert len([*steps]) == 5
        return
    assert [next(steps)["step"], next(steps)["step"]] == [1, 2]
    message = (
        r"the loss of step 3 is not finite: worker 2 of 4: NaN in the loss and NaN in the gradient "
        r"of `Conv_0/kernel`, `Conv_1/kernel`, `Dense_0/kernel` and \d+ more\. Correct the data"
    )
    with pytest.raises(ExperimentError, match=message):
        next(steps)


@pytest.mark.slow
@pytest.mark.parametrize("simulated", [False, True])
def test_a_method_without_gradients_trains(task: Task, simulated: bool) -> None:
    """Its update has no mean gradient to compare with, unless that is computed for it."""
    program = make_program(
        task, make_variant("zeroth_order", None), "sgd", 0.003, 64, make_mesh(4),
        simulated=simulated,
    )  # fmt: skip
    *_, last = train(program, seed=0, steps=40, log_every=20)
    first, _ = task.train_score(task.first_weights(0))
    assert last["train_loss"] < first - 0.05 and last["bytes_per_step"] < 500
    assert np.isnan(last["compression_error"]) == simulated
