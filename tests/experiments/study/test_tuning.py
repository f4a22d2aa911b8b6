"""The search of parameters: its budget, choice, refinement, extension and mark of the edge."""

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.study.tuning import EXTENSIONS, Choice, Values, initial_points, search

NAN, RATES = math.nan, Values((0.01, 0.1, 1.0))
VALUES = st.lists(st.integers(1, 50).map(float), min_size=1, max_size=5, unique=True)
GRIDS = st.lists(VALUES.map(lambda each: Values(tuple(each))), min_size=1, max_size=3).map(
    lambda axes: {f"p{number}": axis for number, axis in enumerate(axes)}
)


def tried(grid: Any, budget: int, loss: Any) -> tuple[Choice, list[Any]]:
    """The choice, and the points of the trials in their order; one value for one parameter."""
    points: list[Any] = []

    def trial(parameters: dict[str, Any]) -> float:
        point = tuple(parameters.values())
        points.append(point if point[1:] else point[0])
        return loss(*point)

    return search(grid, budget, trial), points


@settings(deadline=None, max_examples=60)
@given(GRIDS, st.integers(1, 30), st.integers(0, 1000))
def test_the_choice_is_the_best_and_the_grid_is_covered_evenly(
    grid: Any, points: int, salt: int
) -> None:
    losses: dict[Any, float] = {}

    def trial(parameters: dict[str, Any]) -> float:
        point = tuple(parameters.values())
        assert point not in losses
        losses[point] = hash((salt, point)) % 97 / 7
        return losses[point]

    choice = search(grid, points, trial)
    assert choice.trials == len(losses) <= points + EXTENSIONS * len(grid)
    assert losses[tuple(choice.parameters.values())] == min(losses.values())
    chosen = initial_points(grid, points)
    assert len(chosen) == len({*chosen}) <= points and {*chosen} <= losses.keys()
    for position, axis in enumerate(grid.values()):
        counts = Counter(point[position] for point in chosen)
        assert len(counts) == min(points, len(axis.values))


def test_a_smaller_grid_is_refined_around_the_best() -> None:
    choice, rates = tried({"rate": RATES}, 7, lambda rate: math.log(rate / 0.2) ** 2)
    assert rates == [0.01, 0.1, 1.0, 0.0316, 0.316, 0.562, 0.178]
    assert choice == Choice({"rate": 0.178}, (), 7)
    # The rate 1 is tried with one batch, becomes the best, and is tried with the other.
    grid = {"rate": Values((0.1, 10.0)), "batch": Values((1, 4), lowest=1, highest=4)}
    choice, points = tried(grid, 9, lambda r, b: math.log(r) ** 2 + (b - 2) ** 2)
    assert points[4:] == [(1.0, 1), (1.0, 4), (0.316, 1), (3.16, 1), (1.0, 2)]
    assert choice.parameters == {"rate": 1.0, "batch": 2}


@pytest.mark.parametrize(
    ("low", "beyond", "at_edge"),
    [
        (0.1, [], ()),
        (100, [10.0, 100.0, 1000.0], ()),
        (1e-4, [1e-3, 1e-4, 1e-5], ()),
        (1e9, [10.0**n for n in range(1, 7)], ("rate",)),
    ],
)
def test_a_choice_at_an_end_extends_the_grid(low: float, beyond: Any, at_edge: Any) -> None:
    """Until it is no end, and at most 6 times; then it is marked."""
    choice, rates = tried({"rate": RATES}, 3, lambda rate: math.log(rate / low) ** 2)
    assert rates[3:] == pytest.approx(beyond) and choice.trials == len(rates)
    assert choice.at_edge == at_edge
    assert choice.text.endswith("(at the edge of the grid: rate)") == bool(at_edge)


def test_bounds_integers_names_ties_and_diverged_trials() -> None:
    bounded, names = {"density": Values((0.25, 0.5), highest=1.0)}, {"abort": 2, "keep": 1}
    assert tried(bounded, 2, lambda p: -p)[0] == Choice({"density": 1.0}, (), 3)
    choice, points = tried({"batch": Values((2, 4, 8))}, 4, lambda batch: batch)
    assert points == [2, 4, 8, 3, 1] and choice == Choice({"batch": 1}, (), 5)
    choice, _ = tried({"policy": Values((*names,))}, 8, names.get)
    assert choice == Choice({"policy": "keep"}, (), 2)
    assert tried({"rate": RATES}, 3, lambda rate: 1.0)[0].parameters["rate"] < 0.01
    choice, _ = tried({"rate": RATES}, 3, lambda rate: NAN if rate < 1 else rate)
    assert choice.parameters == {"rate": 1.0}
    diverged, points = tried({"rate": RATES}, 3, lambda rate: NAN)
    assert len(points) == 3 + EXTENSIONS and diverged.parameters["rate"] < 0.01
