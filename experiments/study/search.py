"""Tuning: one search with one budget of trials for every method, on validation data.

A method declares a grid over its own parameters. Every method tries the same number of points:

- Of a larger grid, a part that covers the values of every parameter evenly.
- Of a smaller grid, all points, and then neighbors of the best and points between.

Then, at most twice, a choice at an end of its grid extends the grid by one value. A choice that is
still at an end is marked, since a value outside the grid may be better.
"""

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.study.statistics import mean

Point = tuple[Any, ...]


class Axis(NamedTuple):
    """The values of one parameter.

    Attributes:
      values: The values of the grid, such as `(0.01, 0.1)`. Other than numbers above 0, such as
        names, have no order: they are neither extended nor refined. Integers stay integers.
      lowest: The least value that the parameter may have.
      highest: The largest value that the parameter may have.
    """

    values: tuple[Any, ...]
    lowest: float = 0.0
    highest: float = math.inf

    @property
    def is_ordered(self) -> bool:
        """Whether the values are numbers above 0."""
        return all(
            isinstance(value, int | float) and not isinstance(value, bool) and value > 0
            for value in self.values
        )

    def _rounded(self, value: float) -> Any:
        """An integer if all values are, and otherwise three digits, which read well in a table."""
        if all(isinstance(each, int) for each in self.values):
            return max(1, round(value))
        return float(f"{value:.3g}")

    def outward(self, values: Sequence[Any], value: Any) -> list[Any]:
        """The next value after an end of `values` in geometric order, if there is one."""
        if not self.is_ordered or len(values) < 2 or value not in (min(values), max(values)):
            return []
        ordered = sorted(values)
        neighbor = ordered[1] if value == ordered[0] else ordered[-2]
        following = self._rounded(min(max(value * value / neighbor, self.lowest), self.highest))
        return [] if following in (0, *ordered) or math.isinf(following) else [following]

    def around(self, values: Sequence[Any], value: Any) -> list[Any]:
        """The neighbors of a value in `values`, and the geometric means of it and them."""
        if not self.is_ordered:
            return []
        ordered = sorted(values)
        place = ordered.index(value)
        neighbors = ordered[place + 1 : place + 2] + ordered[max(0, place - 1) : place]
        means = [self._rounded(math.sqrt(value * neighbor)) for neighbor in neighbors]
        return neighbors + [each for each in means if each not in ordered]


Grid = Mapping[str, Axis]


class Budget(NamedTuple):
    """The trials of every method.

    Attributes:
      points: The number of points that a method tries, before extensions.
      seeds: The number of seeds per point.
      extensions: The largest number of times that a grid is extended.
    """

    points: int
    seeds: int = 1
    extensions: int = 2


class Choice(NamedTuple):
    """The result of a search.

    Attributes:
      parameters: The point with the least mean validation loss; the first of a tie.
      loss: Its mean validation loss; infinite if a run diverged.
      at_edge: The parameters whose value is an end of the tried values.
      trials: The number of trials, over points and seeds.
    """

    parameters: dict[str, Any]
    loss: float
    at_edge: tuple[str, ...]
    trials: int

    @property
    def text(self) -> str:
        """The parameters, such as `learning_rate 0.1 (edge), batch 4`."""
        return ", ".join(
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in self.parameters.items()
        ) + (f" (at the edge of the grid: {', '.join(self.at_edge)})" if self.at_edge else "")


def _distance(point: Point, other: Point) -> float:
    """The largest factor between values of two points that differ in numbers only."""
    pairs = [(a, b) for a, b in zip(point, other, strict=True) if a != b]
    return max(max(a / b, b / a) for a, b in pairs)


class _Search:
    """The points tried so far."""

    def __init__(self, grid: Grid, budget: Budget, trial: Callable[[dict[str, Any], int], float]):
        self.grid, self.budget, self.trial = grid, budget, trial
        self.losses: dict[Point, float] = {}

    def parameters(self, point: Point) -> dict[str, Any]:
        return dict(zip(self.grid, point, strict=True))

    def attempt(self, point: Point) -> None:
        if point in self.losses:
            return
        losses = [self.trial(self.parameters(point), n) for n in range(self.budget.seeds)]
        total = mean(losses)
        self.losses[point] = total if math.isfinite(total) else math.inf

    @property
    def best(self) -> Point:
        return min(self.losses, key=lambda point: (self.losses[point], self.rank(point)))

    def rank(self, point: Point) -> tuple[float, ...]:
        """Smaller values first, and names in the order of the grid."""
        return tuple(
            value if axis.is_ordered else axis.values.index(value)
            for axis, value in zip(self.grid.values(), point, strict=True)
        )

    def tried(self, position: int) -> list[Any]:
        """The values tried of one parameter."""
        return [*dict.fromkeys(point[position] for point in self.losses)]

    def moved(self, move: Callable[[Axis, Sequence[Any], Any], Sequence[Any]]) -> list[Point]:
        """Points not tried that differ from the best in one parameter."""
        best = self.best
        points = [
            (*best[:position], value, *best[position + 1 :])
            for position, axis in enumerate(self.grid.values())
            for value in move(axis, self.tried(position), best[position])
        ]
        return [point for point in points if point not in self.losses]

    def refine(self) -> None:
        """Tries the farthest point around the best until the budget is spent or there is none."""
        while len(self.losses) < self.budget.points:
            best = self.best
            new = self.moved(Axis.around)
            if not new:
                return
            self.attempt(max(new, key=lambda point: _distance(point, best)))

    def extend(self) -> None:
        """Tries one more value of every parameter whose best value is an end."""
        for _ in range(self.budget.extensions):
            for point in self.moved(Axis.outward):
                self.attempt(point)

    def at_edge(self) -> tuple[str, ...]:
        ends = zip(self.grid.items(), self.best, range(len(self.grid)), strict=True)
        return tuple(
            name
            for (name, axis), value, position in ends
            if axis.outward(self.tried(position), value)
        )


def initial_points(grid: Grid, points: int) -> list[Point]:
    """The points of a grid; of a larger grid, `points` of them that cover every axis evenly.

    Example:
      >>> initial_points({"rate": Axis((0.1, 1.0)), "batch": Axis((1, 2))}, 4)
      [(0.1, 1), (0.1, 2), (1.0, 1), (1.0, 2)]
    """
    product = [*itertools.product(*(axis.values for axis in grid.values()))]
    if len(product) <= points:
        return product
    order = random.Random(0)
    remaining, chosen = order.sample(product, len(product)), []
    counts: dict[tuple[int, Any], int] = {}
    for _ in range(points):
        best = min(remaining, key=lambda point: sum(counts.get(v, 0) for v in enumerate(point)))
        remaining.remove(best)
        chosen.append(best)
        for value in enumerate(best):
            counts[value] = counts.get(value, 0) + 1
    return sorted(chosen, key=product.index)


def search(grid: Grid, budget: Budget, trial: Callable[[dict[str, Any], int], float]) -> Choice:
    """The parameters with the least mean validation loss.

    Args:
      grid: The axis of each parameter by its name; a plain tuple has the arguments of an `Axis`.
      budget: The number of trials.
      trial: `(parameters, number of the seed) -> validation loss`; not finite if it diverged.

    Raises:
      ValueError: If there is no parameter or no value, or the budget has no trial.

    Example:
      >>> choice = search(
      ...     {"rate": Axis((0.1, 1.0))}, Budget(2), lambda p, seed: (p["rate"] - 9) ** 2
      ... )
      >>> choice.parameters, choice.trials
      ({'rate': 10.0}, 4)
    """
    grid = {name: Axis(*axis) for name, axis in grid.items()}
    if budget.points < 1 or budget.seeds < 1:
        raise ValueError(f"A budget has at least 1 point and 1 seed, got {budget}.")
    if not grid or not all(axis.values for axis in grid.values()):
        raise ValueError("A grid has at least one parameter, and every parameter a value.")
    of_method = _Search(grid, budget, trial)
    for point in initial_points(grid, budget.points):
        of_method.attempt(point)
    of_method.refine()
    of_method.extend()
    best = of_method.best
    return Choice(
        of_method.parameters(best),
        of_method.losses[best],
        of_method.at_edge(),
        budget.seeds * len(of_method.losses),
    )
