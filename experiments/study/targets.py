"""What a run needs, such as steps or bytes, until its loss is at most a target."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.study.claims import Results
from experiments.study.columns import Line
from experiments.study.groups import Estimate, Group, Spread, Value
from experiments.study.statistics import mean, paired_log_ratio, sd
from experiments.study.tidy import Row, grouped, is_missing, of_kind


def _at_part(points: Sequence[Row], measure: str, part: float) -> float:
    """The measure at the last logged point of the first part of the run."""
    last = part * points[-1]["step"] + 1e-9
    return ([each for each in points if each["step"] <= last] or points)[-1][measure]


def _needed(group: Group, column: str) -> list[float]:
    """What the runs that reached the target needed."""
    return [each for each in group.values(f"{column}_to_target") if not is_missing(each)]


def reached(column: str) -> Value:
    """How many of the runs reached the target, such as `4/5`."""
    return lambda group: f"{len(_needed(group, column))}/{len(group.runs)}"


def needed(column: str) -> Value:
    """The mean and the standard deviation of what the runs that reached the target needed."""

    def value(group: Group) -> Spread | None:
        values = _needed(group, column)
        return Spread(mean(values), sd(values)) if values else None

    return value


def fastest(groups: Sequence[Group], column: str) -> Group | None:
    """The group that needed the least on average, of those that reached the target in all runs."""
    all_reached = [group for group in groups if len(_needed(group, column)) == len(group.runs)]
    return min(all_reached, key=lambda group: mean(_needed(group, column)), default=None)


def describe_fastest(lines: Sequence[Line], keys: Sequence[str], column: str) -> str:
    """The fastest group per values of keys, and what it needed."""
    places: dict[tuple, list[Group]] = {}
    for line in lines:
        places.setdefault(tuple(line.group.keys[key] for key in keys), []).append(line.group)
    best = [fastest(groups, column) for groups in places.values()]
    return "; ".join(
        f"{', '.join(map(str, group.keys.values()))} ({mean(_needed(group, column)):.3g})"
        for group in best
        if group
    )


def over_fastest(column: str, others: Sequence[Mapping[str, Any]]) -> Value:
    """The ratio to the fastest of other groups, paired by seed, and its interval.

    Args:
      column: The column of what is needed.
      others: The keys by which each of the other groups differs.
    """

    def value(group: Group) -> Estimate | None:
        best = fastest([other for keys in others if (other := group.other(**keys))], column)
        if best is None:
            return None
        both = [each.by_seed(f"{column}_to_target") for each in (group, best)]
        return Estimate(*paired_log_ratio(*both).ratio)

    return value


def show_ratio(ratio: Estimate) -> str:
    """A ratio and its interval, if both reach the target with all seeds.

    Example:
      >>> show_ratio(Estimate(0.5, 0.4, 0.625)), show_ratio(Estimate(*[math.inf] * 3))
      ('0.50 [0.40, 0.62]', 'not reached')
      >>> show_ratio(Estimate(0.0, 0.0, 0.0))
      'only here reached'
    """
    if math.isinf(ratio.mean):
        return "not reached"
    if not ratio.mean:
        return "only here reached"
    interval = "" if math.isnan(ratio.low) else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
    return f"{ratio.mean:.2f}{interval}"


def describe_missing(lines: Sequence[Line], key: str) -> str:
    """A sentence on the settings without a target, by the values of a key; empty if there is none.

    Example:
      >>> runs = [{"kind": "run", "target": math.nan}]
      >>> describe_missing([Line(Group({"dataset": "text"}, runs, {}, {}), {})], "dataset")
      'The reference diverged with some seeds of text, which therefore has no target.'
    """
    places = [line.group.keys[key] for line in lines if math.isnan(line.group.runs[0]["target"])]
    names = " and ".join(map(str, dict.fromkeys(places)))
    if not names:
        return ""
    return f"The reference diverged with some seeds of {names}, which therefore has no target."


def mark(axes: Any, results: Results, keys: Mapping[str, Any]) -> None:
    """Draws the target in a panel of a figure."""
    for line in results.lines:
        if keys.items() <= line.group.keys.items():
            axes.axhline(line.group.runs[0]["target"], color="black", linewidth=0.6)


def add_targets(
    rows: Sequence[Row],
    within: Sequence[str],
    reference: Mapping[str, Any],
    measure: str,
    columns: Sequence[str],
    *,
    interpolated: bool = False,
    part: float = 0.5,
) -> list[Row]:
    """Adds to every run what it needed to reach the target of its setting.

    The target is the measure of the reference after half of its steps, averaged over seeds. A run
    gets the value of `<column>_to_target` at its first logged point with at most the target; NaN if
    it has none or diverges later, and `target`.

    Args:
      rows: The rows.
      within: The keys of a setting.
      reference: The keys and values of the reference in every setting.
      measure: The column that is compared with the target; lower is better.
      columns: The columns of what is needed.
      interpolated: Whether to interpolate between that point and the one before it.
      part: The part of the steps of the reference, if it is not a half.

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
            halves.setdefault(keys[: len(within)], []).append(_at_part(of_run, measure, part))

    def reached(run: Row) -> Row:
        keys = tuple(run[name] for name in names)
        target = mean(halves.get(keys[: len(within)], ()))
        found = _at_target(points.get(keys, ()), measure, target, columns, interpolated)
        return {**run, "target": target, **found}

    return [reached(row) if row["kind"] == "run" else row for row in rows]


def _at_target(
    points: Sequence[Row], measure: str, target: float, columns: Sequence[str], interpolated: bool
) -> dict[str, float]:
    """The columns where the measure of a run first is at most the target."""
    place = next((n for n, each in enumerate(points) if each[measure] <= target), None)
    if place is None or not math.isfinite(points[-1][measure]):
        return {f"{column}_to_target": math.nan for column in columns}
    first, before = points[place], points[max(0, place - 1)]
    part: float = 0
    if interpolated and target < before[measure] < math.inf:
        part = (target - first[measure]) / (before[measure] - first[measure])
    return {f"{name}_to_target": first[name] - part * (first[name] - before[name])
            for name in columns}  # fmt: skip
