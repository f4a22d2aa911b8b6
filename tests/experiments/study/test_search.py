"""The search of parameters: its budget, choice, refinement, extension and mark of the edge."""

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.study.search import Axis, Budget, Choice, initial_points, search

NAN = math.nan
RATES = Axis((0.01, 0.1, 1.0))
AXES = st.lists(
    st.lists(st.integers(1, 50), min_size=1, max_size=5, unique=True).map(
        lambda values: Axis(tuple(float(value) for value in values))
    ),
    min_size=1,
    max_size=3,
)


class Trials:
    """Records the trials of a search over a function of the parameters."""

    def __init__(self, loss: Any):
        self.loss, self.calls = loss, []

    def __call__(self, parameters: dict[str, Any], seed: int) -> float:
        self.calls.append((tuple(parameters.values()), seed))
        return self.loss(seed=seed, **parameters)


def valley(low: float) -> Any:
    """The squared distance from `low` on a logarithmic axis."""
    return Trials(lambda rate, seed: math.log(rate / low) ** 2)


@settings(deadline=None)
@given(AXES, st.integers(1, 30), st.integers(1, 3), st.integers(0, 1000))
def test_the_choice_is_the_best_of_all_trials(
    axes: list[Axis], points: int, seeds: int, salt: int
) -> None:
    losses: dict[Any, list[float]] = {}

    def trial(parameters: dict[str, Any], seed: int) -> float:
        point = tuple(parameters.values())
        loss = hash((salt, point, seed)) % 97 / 7
        losses.setdefault(point, []).append(loss)
        return loss

    grid = {f"p{number}": axis for number, axis in enumerate(axes)}
    choice = search(grid, Budget(points, seeds), trial)
    means = {point: sum(each) / seeds for point, each in losses.items()}
    assert all(len(each) == seeds for each in losses.values())
    assert choice.trials == seeds * len(losses)
    assert choice.loss == pytest.approx(min(means.values()))
    assert means[tuple(choice.parameters.values())] == pytest.approx(choice.loss)
    assert len(losses) <= points + 2 * len(axes)  # Two extensions.


@settings(deadline=None)
@given(AXES, st.integers(1, 40))
def test_a_part_of_a_grid_covers_every_axis_evenly(axes: list[Axis], points: int) -> None:
    grid = {f"p{number}": axis for number, axis in enumerate(axes)}
    chosen = initial_points(grid, points)
    size = math.prod(len(axis.values) for axis in axes)
    assert len(chosen) == len({*chosen}) == min(points, size)
    for position, axis in enumerate(axes):
        counts = Counter(point[position] for point in chosen)
        assert len(counts) >= min(points, len(axis.values))


def test_a_smaller_grid_is_refined_around_the_best() -> None:
    trials = valley(0.2)
    choice = search({"rate": RATES}, Budget(7), trials)
    rates = [point[0] for point, _ in trials.calls]
    assert rates == [0.01, 0.1, 1.0, 0.0316, 0.316, 0.562, 0.178]
    assert choice.parameters == {"rate": 0.178}


def test_the_refinement_tries_the_neighbors_of_a_new_best() -> None:
    """The rate 1 is tried with one batch, becomes the best, and is tried with the other."""
    grid = {"rate": Axis((0.1, 10.0)), "batch": Axis((1, 4))}
    trials = Trials(lambda rate, batch, seed: math.log(rate) ** 2 + (batch - 2) ** 2)
    choice = search(grid, Budget(9, extensions=0), trials)
    tried = [point for point, _ in trials.calls]
    assert tried[4:] == [(1.0, 1), (1.0, 4), (0.316, 1), (3.16, 1), (1.0, 2)]
    assert choice.parameters == {"rate": 1.0, "batch": 2}


@pytest.mark.parametrize(
    ("low", "tried", "best", "at_edge"),
    [
        (0.1, [], 0.1, ()),
        (7, [10.0, 100.0], 10, ()),
        (100, [10.0, 100.0], 100, ("rate",)),
        (1e9, [10.0, 100.0], 100, ("rate",)),
        (1e-9, [0.001, 0.0001], 0.0001, ("rate",)),
    ],
)
def test_a_choice_at_an_end_extends_the_grid_twice(
    low: float, tried: list[float], best: float, at_edge: tuple[str, ...]
) -> None:
    trials = valley(low)
    choice = search({"rate": RATES}, Budget(3), trials)
    assert [point[0] for point, _ in trials.calls[3:]] == pytest.approx(tried)
    assert choice.parameters == {"rate": pytest.approx(best)} and choice.at_edge == at_edge
    assert choice.trials == len(trials.calls)


@pytest.mark.parametrize("axis", [Axis((0.25, 0.5), highest=1.0), ((0.25, 0.5), 0.0, 1.0)])
def test_a_limit_of_a_parameter_is_no_edge(axis: Any) -> None:
    choice = search({"density": axis}, Budget(2), lambda p, seed: -p["density"])
    assert choice == Choice({"density": 1.0}, -1.0, (), 3)
    assert choice._replace(at_edge=("density",)).text.endswith("(at the edge of the grid: density)")


def test_integers_stay_integers_and_names_are_neither_refined_nor_extended() -> None:
    trials = Trials(lambda batch, seed: batch)
    choice = search({"batch": Axis((2, 4, 8))}, Budget(4), trials)
    assert [point for point, _ in trials.calls] == [(2,), (4,), (8,), (3,), (1,)]
    assert choice.parameters == {"batch": 1} and choice.at_edge == ()
    trials = Trials(lambda policy, seed: {"abort": 2, "keep": 1}[policy])
    choice = search({"policy": Axis(("abort", "keep"))}, Budget(8), trials)
    assert choice == Choice({"policy": "keep"}, 1, (), 2)


def test_a_tie_is_the_smallest_value_and_a_diverged_run_is_the_worst() -> None:
    equal = search({"rate": RATES}, Budget(3, extensions=0), lambda p, seed: 1.0)
    assert equal.parameters == {"rate": 0.01} and equal.at_edge == ("rate",)
    partly = search(
        {"rate": RATES},
        Budget(3, seeds=2),
        lambda p, seed: NAN if seed and p["rate"] < 1 else (9.0 if p["rate"] == 1 else 99.0),
    )
    assert partly.parameters == {"rate": 1.0} and partly.loss == 9
    diverged = search({"rate": RATES}, Budget(3), lambda p, seed: NAN)
    assert diverged.loss == math.inf and diverged.parameters == {"rate": pytest.approx(0.0001)}
