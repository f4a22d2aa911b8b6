"""Groups of rows, and the values that columns of a table show of them."""

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.study.statistics import mean, sd
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


def spread(name: str) -> Value:
    """The mean and the standard deviation of a column over seeds."""

    def value(group: Group) -> Spread:
        values = group.values(name)
        return Spread(mean(values), sd(values))

    return value


def mean_of(name: str) -> Value:
    """The mean of a column over seeds."""
    return lambda group: mean(group.values(name))


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
