"""Groups of rows, and the values that columns of a table show of them."""

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.study.statistics import (
    Difference,
    confidence_interval,
    mean,
    paired_difference,
    paired_log_ratio,
    sd,
)
from experiments.study.tidy import Kind, Row, of_kind


class Group:
    """The rows that share the values of some keys, such as one method on one graph.

    Attributes:
      keys: The values of the keys.
      rows: The rows of all kinds.
    """

    def __init__(
        self,
        keys: Mapping[str, Any],
        rows: Sequence[Row],
        groups: Mapping[tuple, "Group"],
        reference: Mapping[str, Any],
    ):
        """Makes one of the `groups` of a table, which are by the values of their keys."""
        self.keys, self.rows = dict(keys), rows
        self._groups, self._reference = groups, reference

    @functools.cached_property
    def runs(self) -> list[Row]:
        """The ends of the runs, one per seed."""
        return of_kind(self.rows, "run")

    @property
    def trials(self) -> list[Row]:
        """The trials of the tuning."""
        return of_kind(self.rows, "trial")

    def values(self, name: str, kind: Kind = "run", *, optional: bool = False) -> list[Any]:
        """The values of one column, one per row of the kind.

        Args:
          name: The column.
          kind: The kind of the rows.
          optional: Whether rows may lack the column; its value is then NaN.
        """
        rows = of_kind(self.rows, kind)
        return [row.get(name, math.nan) if optional else row[name] for row in rows]

    def by_seed(self, name: str) -> dict[int, Any]:
        """The values of one column of the runs by seed."""
        return {row["seed"]: row[name] for row in self.runs}

    def other(self, **keys: Any) -> "Group | None":
        """The group whose keys differ from those of this group only by `keys`, if it exists."""
        return self._groups.get(tuple({**self.keys, **keys}.values()))

    def compared_with(self, reference: Mapping[str, Any]) -> "Group":
        """The same group with another reference."""
        return Group(self.keys, self.rows, self._groups, reference)

    @property
    def is_reference(self) -> bool:
        """Whether this is the group with which others are compared."""
        return bool(self._reference) and self._reference.items() <= self.keys.items()

    @property
    def reference(self) -> "Group | None":
        """The group with which this group is compared, if it exists."""
        return self.other(**self._reference) if self._reference else None

    @property
    def paired(self) -> "Group | None":
        """The reference, with only the runs of the seeds of this group; None without such runs."""
        reference, seeds = self.reference, {run["seed"] for run in self.runs}
        if reference is None:
            return None
        rows = [row for row in reference.rows if row["kind"] != "run" or row["seed"] in seeds]
        paired = Group(reference.keys, rows, self._groups, self._reference)
        return paired if paired.runs else None


Value = Callable[[Group], Any]


class Spread(NamedTuple):
    """A mean and its standard deviation over seeds, shown as `mean ± sd`."""

    mean: float
    sd: float


class Estimate(NamedTuple):
    """A mean and the ends of its interval or range, shown as `mean [low, high]`."""

    mean: float
    low: float
    high: float


def spread(name: str) -> Value:
    """The mean and the standard deviation of a column over seeds."""

    def value(group: Group) -> Spread:
        values = group.values(name)
        return Spread(mean(values), sd(values))

    return value


def mean_of(name: str, *, optional: bool = False) -> Value:
    """The mean of a column over seeds; NaN without an optional one."""
    return lambda group: mean(group.values(name, optional=optional))


def max_of(name: str) -> Value:
    """The largest value of a column over seeds; NaN without it."""
    return lambda group: max(group.values(name, optional=True))


def median_of(name: str) -> Value:
    """The median of a column over seeds."""
    return lambda group: statistics.median(group.values(name))


def first(name: str, kind: Kind = "run") -> Value:
    """The first value of a column that no seed changes; NaN without rows of the kind."""
    return lambda group: next(iter(group.values(name, kind, optional=True)), math.nan)


def over_reference(value: Value) -> Value:
    """The value divided by that of the reference, from the runs of common seeds; NaN without."""

    def ratio(group: Group) -> float:
        reference = value(group.paired) if group.paired else None
        return value(group) / reference if reference else math.nan

    return ratio


def deviations(name: str) -> Value:
    """The difference of the mean from the reference, in its standard deviations over seeds."""
    value_of = spread(name)

    def value(group: Group) -> float:
        if group.reference is None:
            return math.nan
        center, deviation = value_of(group.reference)
        return (value_of(group).mean - center) / (deviation or math.nan)

    return value


def compared_with(value: Value, **reference: Any) -> Value:
    """The value in comparison with another reference than that of the table."""
    return lambda group: value(group.compared_with(reference))


def over(value: Value, **keys: Any) -> Value:
    """The value divided by that of the group with other `keys`; NaN without one."""

    def ratio(group: Group) -> float:
        other = group.other(**keys)
        divisor = value(other) if other else None
        return value(group) / divisor if divisor else math.nan

    return ratio


def relative(name: str) -> Value:
    """The mean of a column over seeds, divided by that of the reference."""
    return over_reference(mean_of(name))


def interval(name: str, level: float = 0.95) -> Value:
    """The mean of a column over seeds, and its confidence interval."""

    def value(group: Group) -> Estimate:
        values = group.values(name)
        return Estimate(mean(values), *confidence_interval(values, level))

    return value


def extent(name: str) -> Value:
    """The mean of a column over seeds, and its range."""

    def value(group: Group) -> Estimate:
        values = group.values(name)
        return Estimate(mean(values), min(values), max(values))

    return value


def ratio_of(total: str, count: str) -> Value:
    """The sum of a column over that of another, such as seconds per step; None without them."""

    def value(group: Group) -> float | None:
        both = [group.values(name, optional=True) for name in (total, count)]
        totals, counts = (sum(each) if each else math.nan for each in both)
        return None if math.isnan(totals) or not counts > 0 else totals / counts

    return value


def _difference(
    group: Group, name: str, log: bool, level: float, lower_is_better: bool = True
) -> Difference | None:
    """The difference from the reference, paired by seed; None for the reference itself."""
    if group.is_reference or group.reference is None:
        return None
    both = group.by_seed(name), group.reference.by_seed(name)
    if log:
        return paired_log_ratio(*both, level=level)
    return paired_difference(*both, level=level, lower_is_better=lower_is_better)


def difference(
    name: str, *, level: float = 0.95, log: bool = False, lower_is_better: bool = True
) -> Value:
    """The difference from the reference, paired by seed, and its interval; with `log` the ratio."""

    def value(group: Group) -> Estimate | None:
        found = _difference(group, name, log, level, lower_is_better)
        return found and Estimate(*(found.ratio if log else found[:3]))

    return value


def times_above(name: str) -> Value:
    """In how many of the common seeds the value is above that of the reference, such as `1/5`."""

    def value(group: Group) -> str | None:
        if group.is_reference or group.reference is None:
            return None
        values, reference = group.by_seed(name), group.reference.by_seed(name)
        common = values.keys() & reference.keys()
        # A run that diverged is above every finite one.
        above = sum(not values[n] <= reference[n] and reference[n] < math.inf for n in common)
        return f"{above}/{len(common)}"

    return value


def p_value(name: str, *, log: bool = False, is_worse: bool = False) -> Value:
    """The p-value of the difference from the reference, paired by seed.

    Args:
      name: The column; lower is better.
      log: Whether to compare logarithms.
      is_worse: Whether to test with one side that the values are above the reference.
    """

    def value(group: Group) -> float | None:
        found = _difference(group, name, log, 0.95)
        return found and (found.p_greater if is_worse else found.p_value)

    return value


def tuned(name: str) -> Value:
    """A tuned parameter, marked if it is at the edge of its grid; None without it."""

    def value(group: Group) -> str | None:
        run = group.runs[0]
        if name not in run:
            return None
        shown = f"{run[name]:g}" if isinstance(run[name], int | float) else str(run[name])
        return f"{shown} (edge)" if name in run.get("at_edge", "").split(", ") else shown

    return value


def tuned_beside(*names: str) -> Value:
    """The tuned parameters but those of `names`, such as `momentum 0.95 (edge)`; None without."""

    def value(group: Group) -> str | None:
        given = {*group.keys, *names, "schema", "kind", "seed"}
        others = [n for n in group.runs[0] if n not in given and n in (group.trials or [{}])[0]]
        return ", ".join(f"{name} {tuned(name)(group)}" for name in others) or None

    return value
