"""The table of a study: how rows are grouped, and how each group fills the columns."""

import csv
import dataclasses
import functools
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table as RichTable

from experiments.study.record import Kind, Row, grouped, is_missing, of_kind
from experiments.study.statistics import Difference, mean, paired_difference, sd, t_interval

MISSING, DIVERGED = "-", "diverged"


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """The rows of all kinds that share the values of some keys, such as one method on one graph.

    Attributes:
      groups: All groups of the table, by the values of their keys.
      base: The keys of the groups with which others are compared.
    """

    keys: Mapping[str, Any]
    rows: Sequence[Row]
    groups: Mapping[tuple, "Group"]
    base: Mapping[str, Any]

    @functools.cached_property
    def runs(self) -> list[Row]:
        """The ends of the runs, one per seed."""
        return of_kind(self.rows, "run")

    def values(self, name: str, kind: Kind = "run") -> list[Any]:
        """The values of one column, one per row of the kind."""
        rows = self.runs if kind == "run" else of_kind(self.rows, kind)
        return [row[name] for row in rows]

    def by_seed(self, name: str) -> dict[int, Any]:
        """The values of one column of the runs by seed."""
        return {row["seed"]: row[name] for row in self.runs}

    def other(self, **keys: Any) -> "Group | None":
        """The group whose keys differ from those of this group only by `keys`, if it exists."""
        return self.groups.get(tuple({**self.keys, **keys}.values()))

    def compared_with(self, reference: Mapping[str, Any]) -> "Group":
        """The same group with another reference."""
        return dataclasses.replace(self, base=reference)

    @property
    def is_reference(self) -> bool:
        """Whether this is the group with which others are compared."""
        return bool(self.base) and self.base.items() <= self.keys.items()

    @property
    def reference(self) -> "Group | None":
        """The group with which this group is compared, if it exists."""
        return self.other(**self.base) if self.base else None

    @property
    def paired(self) -> "Group | None":
        """The reference without the runs of other seeds; None without runs of those seeds."""
        if (reference := self.reference) is None:
            return None
        seeds = {run["seed"] for run in self.runs}
        rows = [row for row in reference.rows if row["kind"] != "run" or row["seed"] in seeds]
        found = dataclasses.replace(reference, rows=rows)
        return found if found.runs else None

    def difference(self, name: str, *, log: bool = False, level: float = 0.95) -> Difference | None:
        """The difference from the reference, paired by seed; None for the reference itself."""
        if self.is_reference or self.reference is None:
            return None
        both = self.by_seed(name), self.reference.by_seed(name)
        return paired_difference(*both, log=log, level=level)


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
    return lambda group: Spread(mean(group.values(name)), sd(group.values(name)))


def mean_of(name: str) -> Value:
    """The mean of a column over seeds."""
    return lambda group: mean(group.values(name))


def first(name: str, kind: Kind = "run") -> Value:
    """The first value of a column that no seed changes; NaN without rows of the kind."""
    return lambda group: next((row.get(name) for row in of_kind(group.rows, kind)), math.nan)


def interval(name: str) -> Value:
    """The mean of a column over seeds, and its confidence interval."""
    return lambda group: Estimate(mean(each := group.values(name)), *t_interval(each))


def extent(name: str) -> Value:
    """The mean of a column over seeds, and its range."""
    return lambda group: Estimate(mean(each := group.values(name)), min(each), max(each))


def over_reference(value: Value) -> Value:
    """The value divided by that of the reference, from the runs of common seeds; NaN without."""

    def ratio(group: Group) -> float:
        divisor = value(group.paired) if group.paired else None
        return value(group) / divisor if divisor else math.nan

    return ratio


def relative(name: str) -> Value:
    """The mean of a column over seeds, divided by that of the reference."""
    return over_reference(mean_of(name))


def compared_with(value: Value, **reference: Any) -> Value:
    """The value in comparison with another reference than that of the table."""
    return lambda group: value(group.compared_with(reference))


def difference(name: str, *, log: bool = False) -> Value:
    """The difference from the reference, paired by seed, and its interval; with `log` the ratio."""

    def value(group: Group) -> Estimate | None:
        found = group.difference(name, log=log)
        return found and Estimate(*(found.ratio if log else found[:3]))

    return value


def tuned(name: str) -> Value:
    """A tuned parameter, marked if it is at the edge of its grid; None without it."""

    def value(group: Group) -> str | None:
        run = group.runs[0]
        if name not in run:
            return None
        shown = f"{run[name]:g}" if isinstance(run[name], int | float) else str(run[name])
        at_edge = name in run.get("at_edge", "").split(", ")
        return f"{shown} (at the edge of the grid)" if at_edge else shown

    return value


def tuned_beside(*names: str) -> Value:
    """The tuned parameters but those of `names`, such as `momentum 0.95`; None without."""

    def value(group: Group) -> str | None:
        given = {*group.keys, *names, "kind", "seed"}
        trials = of_kind(group.rows, "trial") or [{}]
        others = [name for name in group.runs[0] if name in trials[0] and name not in given]
        return ", ".join(f"{name} {tuned(name)(group)}" for name in others) or None

    return value


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
      heading: The heading; None for a column that is only in the CSV.
      value: The value of a group. A missing value (None or NaN) is shown as `-`.
      show: A format such as `".3f"`, or a function of the value.
      name: The name in the CSV and in lines; the heading by default.
      scale: The factor of a shown number, such as 100 for percent.
      text: Whether the column is of text, which is aligned on the left.
      hidden: Whether the terminal lacks the column.
      in_csv: Whether the CSV has the column.
    """

    heading: str | None
    value: Value
    show: str | Callable[[Any], str] = ""
    name: str = ""
    scale: float = 1
    text: bool = False
    hidden: bool = False
    in_csv: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.heading)

    def cell(self, value: Any) -> str:
        """The text of a cell.

        Example:
          >>> accuracy = Column("accuracy %", spread("accuracy"), ".1f", scale=100)
          >>> accuracy.cell(Spread(0.95, 0.011)), accuracy.cell(Spread(0.95, float("nan")))
          ('95.0 ± 1.1', '95.0')
        """
        of_seeds = isinstance(value, Spread | Estimate)
        if is_missing(value.mean if of_seeds else value):
            return MISSING
        if callable(self.show):
            return self.show(value)
        if of_seeds:
            center, *rest = [format(self.scale * part, self.show) for part in value]
            if math.isinf(value.mean):
                return DIVERGED
            if any(map(is_missing, value)):
                return center
            return f"{center} ± {rest[0]}" if len(rest) == 1 else f"{center} [{', '.join(rest)}]"
        return format(self.scale * value if type(value) in (int, float) else value, self.show)


def key(name: str, **options: Any) -> Column:
    """The column of a key."""
    return Column(name, lambda group: group.keys[name], text=True, **options)


def only_in_csv(name: str, value: Value) -> Column:
    """A column that is only in the CSV."""
    return Column(None, value, name=name)


SEEDS = only_in_csv("seeds", lambda group: len(group.runs))


@dataclasses.dataclass(frozen=True, eq=False)
class Line:
    """One line of a table: a group and its values by the names of the columns."""

    group: Group
    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @property
    def where(self) -> str:
        """The keys of the group, such as `ring_8, iid, dpsgd`."""
        return ", ".join(map(str, self.group.keys.values()))


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of one line per group of rows. A column without any value is not shown.

    Attributes:
      by: The keys of a group. There is a line per group that has a finished run.
      reference: The values of keys of the groups with which others are compared.
      adjacent: Keys of which lines with equal values are adjacent, in the order of the first.

    Example:
      >>> table = Table(("method",), (key("method"), Column("loss", spread("loss"), ".1f")))
      >>> rows = [{"kind": "run", "method": "mean", "seed": n, "loss": n + 1.0} for n in (0, 1)]
      >>> print(table.to_markdown(table.lines(rows)))
      | method | loss |
      | --- | ---: |
      | mean | 1.5 ± 0.7 |
    """

    by: tuple[str, ...]
    columns: tuple[Column, ...]
    reference: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    adjacent: tuple[str, ...] = ()

    def lines(self, rows: Sequence[Row]) -> list[Line]:
        """One line per group with runs, in the order of the first run."""
        by_keys, groups = grouped(rows, self.by), {}
        for keys in grouped(of_kind(rows, "run"), self.by):
            named = dict(zip(self.by, keys, strict=True))
            groups[keys] = Group(named, by_keys[keys], groups, self.reference)
        ranks = {n: [*dict.fromkeys(g.keys[n] for g in groups.values())] for n in self.adjacent}
        ordered = sorted(groups.values(), key=lambda g: [ranks[n].index(g.keys[n]) for n in ranks])
        return [Line(group, {c.name: c.value(group) for c in self.columns}) for group in ordered]

    def _shown(self, lines: Sequence[Line], *, with_hidden: bool) -> tuple[list[Column], list]:
        """The columns with a heading and a value, and the cells."""
        wanted = [c for c in self.columns if c.heading and (with_hidden or not c.hidden)]
        columns = [c for c in wanted if any(c.cell(line[c.name]) != MISSING for line in lines)]
        return columns, [[each.cell(line[each.name]) for each in columns] for line in lines]

    def to_rich(self, lines: Sequence[Line]) -> RichTable:
        """For the terminal, without hidden columns."""
        columns, cells = self._shown(lines, with_hidden=False)
        table = RichTable()
        for c in columns:
            table.add_column(c.heading, justify="left" if c.text else "right", overflow="fold")
        for each in cells:
            table.add_row(*each)
        return table

    def to_markdown(self, lines: Sequence[Line]) -> str:
        """For a README."""
        columns, cells = self._shown(lines, with_hidden=True)
        left = next((n for n, column in enumerate(columns) if not column.text), len(columns))
        return to_markdown([str(column.heading) for column in columns], cells, left)

    def to_csv(self, lines: Sequence[Line]) -> str:
        """As CSV. Numbers have 12 digits, since more differ between versions of Python."""
        fields: list[dict[str, Any]] = [{} for _ in lines]
        for name in (column.name for column in self.columns if column.in_csv):
            for line, of_line in zip(lines, fields, strict=True):
                value = line[name]
                parts = value if isinstance(value, Spread | Estimate) else (value,)
                names = [name, *(f"{name}_{n}" for n in getattr(value, "_fields", ())[1:])]
                rounded = [float(f"{x:.12g}") if isinstance(x, float) else x for x in parts]
                of_line |= dict(zip(names, rounded, strict=True))
        columns, text = dict.fromkeys(name for of_line in fields for name in of_line), io.StringIO()
        writer = csv.DictWriter(text, [*columns], math.nan, lineterminator="\n")
        writer.writeheader()
        writer.writerows(fields)
        return text.getvalue()


def to_markdown(headings: Sequence[str], lines: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table for a README: `left` columns of text, then columns of numbers."""
    rules = ["---"] * left + ["---:"] * (len(headings) - left)
    return "\n".join("| " + " | ".join(line) + " |" for line in (headings, rules, *lines))


def fact_table(rows: Sequence[Row], about: str) -> str:
    """A table of the facts about something, with all their columns."""

    def show(value: Any) -> str:
        if isinstance(value, list):
            return " x ".join(map(show, value)) or MISSING
        form = ".4g" if type(value) is float else ""
        return MISSING if is_missing(value) else format(value, form)

    facts = [row for row in rows if row.get("about") == about]
    names = [*dict.fromkeys(name for row in facts for name in row if name not in ("kind", "about"))]
    cells = [[show(row.get(name)) for name in names] for row in facts]
    return to_markdown([name.replace("_", " ") for name in names], cells)
