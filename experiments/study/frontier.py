"""The lines of a table that no other line beats."""

from collections.abc import Callable, Sequence

from experiments.study.columns import Line


def frontier(lines: Sequence[Line], costs: Callable[[Line], tuple[float, float]]) -> list[Line]:
    """The Pareto frontier, sorted: no other line is lower in one cost and not higher in the other.

    Args:
      lines: The lines of a table.
      costs: `line -> two costs`, such as bytes and loss.
    """
    every = [*map(costs, lines)]

    def is_beaten(x: float, y: float) -> bool:
        return any(a <= x and b <= y and (a, b) != (x, y) for a, b in every)

    return sorted((line for line in lines if not is_beaten(*costs(line))), key=costs)
