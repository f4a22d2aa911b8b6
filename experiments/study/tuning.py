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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

EXTENSIONS = 6
Point = tuple[Any, ...]


class Values(NamedTuple):
    """The values of one parameter in a grid, such as `(0.01, 0.1)`, and the limits of others.

    Other than numbers above 0, such as names, have no order: they are neither extended nor refined.
    Integers stay integers.
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


class Choice(NamedTuple):
    """The point with the least validation loss, and the number of trials.

    `at_edge` has the parameters whose value is an end of the tried values.
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
    counts: Counter[tuple[int, Any]] = Counter()
    for _ in range(points):
        best = min(remaining, key=lambda point: sum(counts[value] for value in enumerate(point)))
        remaining.remove(best)
        chosen.append(best)
        counts.update(enumerate(best))
    return sorted(chosen, key=product.index)


def search(grid: Grid, budget: int, trial: Callable[[dict[str, Any]], float]) -> Choice:
    """The parameters with the least validation loss `trial(parameters)`, NaN if it diverged.

    The budget is the number of points that are tried, before extensions. A plain tuple in the grid
    has the arguments of `Values`.

    Example:
      >>> choice = search({"rate": Values((0.1, 1.0))}, 2, lambda p: (p["rate"] - 9) ** 2)
      >>> choice.parameters, choice.trials
      ({'rate': 10.0}, 4)
    """
    grid = {name: Values(*axis) for name, axis in grid.items()}
    losses: dict[Point, float] = {}

    def attempt(point: Point) -> None:
        if point not in losses:
            loss = trial(dict(zip(grid, point, strict=True)))
            losses[point] = loss if math.isfinite(loss) else math.inf

    def rank(point: Point) -> tuple[float, ...]:
        """Of a tie, the best has smaller values or an earlier name."""
        pairs = zip(grid.values(), point, strict=True)
        places = (x if axis.is_ordered else axis.values.index(x) for axis, x in pairs)
        return losses[point], *places

    def moved(move: Callable[[Values, Sequence[Any], Any], Sequence[Any]]) -> dict[Point, str]:
        """Points not tried that differ from the best in one parameter, which is the value."""
        best, points = min(losses, key=rank), {}
        for place, (name, axis) in enumerate(grid.items()):
            tried = [*{point[place]: 0 for point in losses}]
            for value in move(axis, tried, best[place]):
                points[(*best[:place], value, *best[place + 1 :])] = name
        return {point: name for point, name in points.items() if point not in losses}

    def distance(point: Point) -> float:
        """How far a parameter is from that of the best point."""
        pairs = zip(point, min(losses, key=rank), strict=True)
        return max(max(a / b, b / a) for a, b in pairs if a != b)

    for point in initial_points(grid, budget):
        attempt(point)
    while len(losses) < budget and (new := moved(Values.around)):
        attempt(max(new, key=distance))
    for _ in range(EXTENSIONS):
        for point in moved(Values.beyond):
            attempt(point)
    best, at_edge = min(losses, key=rank), tuple(moved(Values.beyond).values())
    return Choice(dict(zip(grid, best, strict=True)), at_edge, len(losses))
