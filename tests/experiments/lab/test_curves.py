"""The training loop of both frameworks."""

import math

import pytest

from experiments.lab import curves


def test_evaluations_precede_and_follow_training() -> None:
    numbers: list[int] = []

    def step(number: int) -> float:
        numbers.append(number)
        return float(number)

    curve = curves.train(step, lambda: 1 / (1 + len(numbers)), steps=5, evaluate_every=3)
    assert numbers == [0, 1, 2, 3, 4] and curve["losses"] == [0, 1, 2, 3, 4]
    assert curve["steps"] == [0, 3, 5]
    assert curve["evaluated"] == [1, 1 / 4, 1 / 6]
    assert 0 == curve["seconds"][0] < curve["seconds"][1] < curve["seconds"][2]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_training_ends_when_it_diverges(loss: float) -> None:
    losses = iter([1.0, loss, 1.0])
    curve = curves.train(lambda number: 0.0, lambda: next(losses), steps=50, evaluate_every=10)
    assert curve["steps"] == [0, 10] and len(curve["losses"]) == 10
