"""What a run needs, such as steps or bytes, until its loss is at most a target."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.study.claims import Results
from experiments.study.record import Row, grouped, is_missing, of_kind
from experiments.study.statistics import mean, paired_difference, sd
from experiments.study.table import Estimate, Group, Line, Spread, Value


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

    The target is the measure of the reference after a part of its steps, averaged over seeds. A run
    gets the value of `<column>_to_target` at its first logged point with at most the target; NaN if
    it has none or diverges later, and `target`.

    Args:
      rows: The rows.
      within: The keys of a setting.
      reference: The keys and values of the reference in every setting.
      measure: The column that is compared with the target; lower is better.
      columns: The columns of what is needed.
      interpolated: Whether to interpolate between that point and the one before it.
      part: The part of the steps of the reference.

    Example:
      >>> keys = {"method": "mean", "seed": 0}
      >>> points = [{"kind": "point", **keys, "step": n, "loss": 1 / n} for n in (1, 2, 3, 4)]
      >>> run = {"kind": "run", **keys}
      >>> add_targets([*points, run], (), {"method": "mean"}, "loss", ("step",))[-1]
      {'kind': 'run', 'method': 'mean', 'seed': 0, 'target': 0.5, 'step_to_target': 2}
    """
    names = (*within, *reference, "seed")
    points = grouped(of_kind(rows, "point"), names)
    parts: dict[tuple, list[float]] = {}
    for keys, of_run in points.items():
        if keys[len(within) : -1] == tuple(reference.values()):
            last = part * of_run[-1]["step"] + 1e-9
            until = [each for each in of_run if each["step"] <= last] or of_run
            parts.setdefault(keys[: len(within)], []).append(until[-1][measure])

    def needed(of_run: Sequence[Row], target: float) -> dict[str, float]:
        place = next((n for n, each in enumerate(of_run) if each[measure] <= target), None)
        if place is None or not math.isfinite(of_run[-1][measure]):
            return {f"{column}_to_target": math.nan for column in columns}
        first, before, share = of_run[place], of_run[max(0, place - 1)], 0
        if interpolated and target < before[measure] < math.inf:
            share = (target - first[measure]) / (before[measure] - first[measure])
        return {f"{name}_to_target": first[name] - share * (first[name] - before[name])
                for name in columns}  # fmt: skip

    found = []
    for row in rows:
        if row["kind"] == "run":
            keys = tuple(row[name] for name in names)
            target = mean(parts.get(keys[: len(within)], ()))
            row = {**row, "target": target, **needed(points.get(keys, ()), target)}
        found.append(row)
    return found


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
    best = [group for groups in places.values() if (group := fastest(groups, column))]
    return "; ".join(
        f"{', '.join(map(str, group.keys.values()))} ({mean(_needed(group, column)):.3g})"
        for group in best
    )


def over_fastest(column: str, others: Sequence[Mapping[str, Any]]) -> Value:
    """The ratio to the fastest of other groups, whose keys differ, by seed, and its interval."""

    def value(group: Group) -> Estimate | None:
        best = fastest([other for keys in others if (other := group.other(**keys))], column)
        if best is None:
            return None
        both = [each.by_seed(f"{column}_to_target") for each in (group, best)]
        return Estimate(*paired_difference(*both, log=True).ratio)

    return value


def show_ratio(ratio: Estimate, digits: int = 2) -> str:
    """A ratio and its interval, if both reach the target with all seeds; or seconds to it.

    Example:
      >>> show_ratio(Estimate(0.5, 0.4, 0.625)), show_ratio(Estimate(*[math.inf] * 3))
      ('0.50 [0.40, 0.62]', 'not reached')
    """
    if math.isinf(ratio.mean):
        return "not reached"
    if not ratio.mean:
        return "only here reached"
    mean, low, high = (f"{each:.{digits}f}" for each in ratio)
    return mean if math.isnan(ratio.low) else f"{mean} [{low}, {high}]"


def describe_missing(lines: Sequence[Line], key: str) -> str:
    """A sentence on the settings without a target, by the values of a key, if there is one."""
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
