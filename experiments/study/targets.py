"""What a run needs, such as steps or bytes, until its loss is at most a target."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.study.groups import Group, Value
from experiments.study.statistics import mean
from experiments.study.tidy import Row, grouped, is_missing, of_kind


def _half_way(points: Sequence[Row], measure: str) -> float:
    """The measure at the last logged point of the first half of the run."""
    first_half = [each for each in points if 2 * each["step"] <= points[-1]["step"]]
    return (first_half or points)[-1][measure]


def reached(column: str) -> Value:
    """How many of the runs reached the target, such as `4/5`."""

    def value(group: Group) -> str:
        needed = group.values(f"{column}_to_target")
        return f"{sum(not is_missing(each) for each in needed)}/{len(needed)}"

    return value


def add_targets(
    rows: Sequence[Row],
    within: Sequence[str],
    reference: Mapping[str, Any],
    measure: str,
    columns: Sequence[str],
) -> list[Row]:
    """Adds to every run what it needed to reach the target of its setting.

    The target is the measure of the reference after half of its steps, averaged over seeds. A run
    gets the value of `<column>_to_target` at its first logged point with at most the target; NaN if
    it has none, and `target`.

    Args:
      rows: The rows.
      within: The keys of a setting.
      reference: The keys and values of the reference in every setting.
      measure: The column that is compared with the target; lower is better.
      columns: The columns of what is needed.

    Example:
      >>> keys = {"method": "mean", "seed": 0}
      >>> points = [{"kind": "point", **keys, "step": n, "loss": 1 / n} for n in (1, 2, 3, 4)]
      >>> run = {"kind": "run", **keys}
      >>> add_targets([*points, run], (), {"method": "mean"}, "loss", ("step",))[-1]
      {'kind': 'run', 'method': 'mean', 'seed': 0, 'target': 0.5, 'step_to_target': 2}
    """
    names = (*within, *reference, "seed")
    points = grouped(of_kind(rows, "point"), names)
    halves: dict[tuple, list[float]] = {}
    for keys, of_run in points.items():
        if keys[len(within) : -1] == tuple(reference.values()):
            halves.setdefault(keys[: len(within)], []).append(_half_way(of_run, measure))

    def reached(run: Row) -> Row:
        keys = tuple(run[name] for name in names)
        target = mean(halves.get(keys[: len(within)], ()))
        below = [each for each in points.get(keys, ()) if each[measure] <= target]
        first = below[0] if below else {}
        needed = {f"{column}_to_target": first.get(column, math.nan) for column in columns}
        return {**run, "target": target, **needed}

    return [reached(row) if row["kind"] == "run" else row for row in rows]
