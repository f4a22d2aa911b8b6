"""Tuning: one search with one budget of trials for every method, on validation data.

A method declares a grid over its own parameters. Every method tries the same number of points:

- Of a larger grid, a part that covers the values of every parameter evenly.
- Of a smaller grid, all points, and then neighbors of the best and points between.

Then a choice at an end of the tried values extends them, until it is no end, or the parameter has
no value beyond, or it was extended `EXTENSIONS` times. A choice that is still at an end is marked,
since a value outside may be better.
"""

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.study.statistics import mean

EXTENSIONS = 6
Point = tuple[Any, ...]


class Values(NamedTuple):
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
        return all(type(value) in (int, float) and value > 0 for value in self.values)

    def _rounded(self, value: float) -> Any:
        """An integer if all values are, and otherwise three digits, which read well in a table."""
        if all(isinstance(each, int) for each in self.values):
            return max(1, round(value))
        return float(f"{value:.3g}")

    def beyond(self, tried: Sequence[Any], value: Any) -> list[Any]:
        """The next value after an end of `tried` in geometric order, if there is one."""
        if not self.is_ordered or len(tried) < 2 or value not in (min(tried), max(tried)):
            return []
        ordered = sorted(tried)
        neighbor = ordered[1] if value == ordered[0] else ordered[-2]
        following = self._rounded(min(max(value * value / neighbor, self.lowest), self.highest))
        return [] if following in (0, *ordered) or math.isinf(following) else [following]

    def around(self, tried: Sequence[Any], value: Any) -> list[Any]:
        """The neighbors of a value in `tried`, and the geometric means of it and them."""
        if not self.is_ordered:
            return []
        ordered = sorted(tried)
        place = ordered.index(value)
        neighbors = ordered[place + 1 : place + 2] + ordered[max(0, place - 1) : place]
        means = [self._rounded(math.sqrt(value * neighbor)) for neighbor in neighbors]
        return neighbors + [each for each in means if each not in ordered]


Grid = Mapping[str, Values]


class Budget(NamedTuple):
    """The trials of every method.

    Attributes:
      points: The number of points that a method tries, before extensions.
      seeds: The number of seeds per point.
    """

    points: int
    seeds: int = 1


class Choice(NamedTuple):
    """The result of a search.

    Attributes:
      parameters: The point with the least mean validation loss; the first of a tie.
      at_edge: The parameters whose value is an end of the tried values.
      trials: The number of trials, over points and seeds.
    """

    parameters: dict[str, Any]
    at_edge: tuple[str, ...]
    trials: int

    @property
    def text(self) -> str:
        """The parameters, such as `learning_rate 0.1, batch 4 (at the edge of the grid: batch)`."""
        return ", ".join(
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in self.parameters.items()
        ) + (f" (at the edge of the grid: {', '.join(self.at_edge)})" if self.at_edge else "")


class _Search:
    """The points tried so far."""

    def __init__(self, grid: Grid, budget: Budget, trial: Callable[[dict[str, Any], int], float]):
        self.grid, self.budget, self.trial = grid, budget, trial
        self.losses: dict[Point, float] = {}

    def parameters(self, point: Point) -> dict[str, Any]:
        return dict(zip(self.grid, point, strict=True))

    def attempt(self, point: Point) -> None:
        if point not in self.losses:
            total = mean([self.trial(self.parameters(point), n) for n in range(self.budget.seeds)])
            self.losses[point] = total if math.isfinite(total) else math.inf

    @property
    def best(self) -> Point:
        """The point of least loss; of a tie, that of smaller values or of an earlier name."""
        axes = [*self.grid.values()]

        def rank(point: Point) -> tuple[float, ...]:
            return tuple(
                value if axis.is_ordered else axis.values.index(value)
                for axis, value in zip(axes, point, strict=True)
            )

        return min(self.losses, key=lambda point: (self.losses[point], rank(point)))

    def moved(self, move: Callable[[Values, Sequence[Any], Any], Sequence[Any]]) -> list[Point]:
        """Points not tried that differ from the best in one parameter."""
        best = self.best
        points = [
            (*best[:place], value, *best[place + 1 :])
            for place, axis in enumerate(self.grid.values())
            for value in move(axis, [*{point[place]: 0 for point in self.losses}], best[place])
        ]
        return [point for point in points if point not in self.losses]

    def refine(self) -> None:
        """Tries the farthest point around the best until the budget is spent or there is none."""
        while len(self.losses) < self.budget.points and (new := self.moved(Values.around)):
            best = self.best

            def distance(point: Point, best: Point = best) -> float:
                pairs = [(a, b) for a, b in zip(point, best, strict=True) if a != b]
                return max(max(a / b, b / a) for a, b in pairs)

            self.attempt(max(new, key=distance))

    def extend(self) -> None:
        """Tries one more value of every parameter whose best value is an end, and again."""
        for _ in range(EXTENSIONS):
            for point in self.moved(Values.beyond):
                self.attempt(point)

    def at_edge(self) -> tuple[str, ...]:
        best, names = self.best, [*self.grid]
        return tuple(
            name
            for place, name in enumerate(names)
            if self.grid[name].beyond([*{point[place]: 0 for point in self.losses}], best[place])
        )


def initial_points(grid: Grid, points: int) -> list[Point]:
    """The points of a grid; of a larger grid, `points` of them that cover every axis evenly.

    Example:
      >>> initial_points({"rate": Values((0.1, 1.0)), "batch": Values((1, 2))}, 4)
      [(0.1, 1), (0.1, 2), (1.0, 1), (1.0, 2)]
    """
    product = [*itertools.product(*(axis.values for axis in grid.values()))]
    if len(product) <= points:
        return product
    remaining, chosen = random.Random(0).sample(product, len(product)), []
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
      grid: The values of each parameter by its name; a plain tuple has the arguments of `Values`.
      budget: The number of trials.
      trial: `(parameters, number of the seed) -> validation loss`; not finite if it diverged.

    Example:
      >>> choice = search(
      ...     {"rate": Values((0.1, 1.0))}, Budget(2), lambda p, seed: (p["rate"] - 9) ** 2
      ... )
      >>> choice.parameters, choice.trials
      ({'rate': 10.0}, 4)
    """
    grid = {name: Values(*axis) for name, axis in grid.items()}
    of_method = _Search(grid, budget, trial)
    for point in initial_points(grid, budget.points):
        of_method.attempt(point)
    of_method.refine()
    of_method.extend()
    return Choice(
        of_method.parameters(of_method.best),
        of_method.at_edge(),
        budget.seeds * len(of_method.losses),
    )
