"""The specification of a table: how rows are grouped, and how each group fills the columns."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table as RichTable

from experiments.study import table as tables
from experiments.study.groups import Estimate, Group, Spread, Value
from experiments.study.tidy import Row, grouped, is_missing, migrate, of_kind

MISSING = "-"
DIVERGED = "diverged"


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
        if not self.name:
            raise ValueError("A column has a heading or a name.")

    def cell(self, value: Any) -> str:
        """The text of a cell.

        Example:
          >>> from experiments.study.groups import spread
          >>> accuracy = Column("accuracy %", spread("accuracy"), ".1f", scale=100)
          >>> accuracy.cell(Spread(0.95, 0.011)), accuracy.cell(Spread(0.95, float("nan")))
          ('95.0 ± 1.1', '95.0')
          >>> accuracy.cell(float("nan"))
          '-'
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
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return format(self.scale * value, self.show) if is_number else format(value, self.show)

    def csv_fields(self, value: Any) -> dict[str, Any]:
        """The names and the values in the CSV; a spread has two, and an estimate three."""
        if isinstance(value, Spread | Estimate):
            names = [f"{self.name}_{field}" for field in value._fields[1:]]
            return dict(zip((self.name, *names), value, strict=True))
        return {self.name: value}


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
        """The value of a column."""
        return self.values[name]

    @property
    def where(self) -> str:
        """The keys of the group, such as `ring_8, iid, dpsgd`."""
        return ", ".join(map(str, self.group.keys.values()))


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of one line per group of rows.

    Attributes:
      by: The keys of a group. There is a line per group that has a finished run.
      columns: The columns.
      reference: The values of keys of the groups with which others are compared.
      adjacent: Keys of which lines with equal values are adjacent, in the order of the first.

    Example:
      >>> from experiments.study.groups import spread
      >>> table = Table(("method",), (key("method"), Column("loss", spread("loss"), ".1f")))
      >>> lines = table.lines(
      ...     {"kind": "run", "method": "mean", "seed": seed, "loss": seed + 1.0}
      ...     for seed in (0, 1)
      ... )
      >>> print(table.to_markdown(lines))
      | method | loss |
      | --- | ---: |
      | mean | 1.5 ± 0.7 |
    """

    by: tuple[str, ...]
    columns: tuple[Column, ...]
    reference: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    adjacent: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"More than one column has the name {twice[0]!r}.")
        if unknown := {*self.reference, *self.adjacent} - {*self.by}:
            raise ValueError(f"{sorted(unknown)[0]!r} is not a key of the table.")

    def lines(self, rows: Iterable[Row]) -> list[Line]:
        """One line per group with runs, in the order of the first run, of rows of any record."""
        all_rows = migrate(rows)
        by_keys = grouped(all_rows, self.by)
        groups: dict[tuple, Group] = {}
        for keys in grouped(of_kind(all_rows, "run"), self.by):
            named = dict(zip(self.by, keys, strict=True))
            groups[keys] = Group(named, by_keys[keys], groups, self.reference)
        ranks = {name: [*dict.fromkeys(g.keys[name] for g in groups.values())] for name in self.by}
        ordered = sorted(
            groups.values(),
            key=lambda g: [ranks[name].index(g.keys[name]) for name in self.adjacent],
        )
        return [
            Line(group, {column.name: column.value(group) for column in self.columns})
            for group in ordered
        ]

    def _shown(self, lines: Sequence[Line], kept: Callable[[Column], bool]) -> tuple:
        """The headings, the cells, and the number of leading columns of text."""
        columns = [column for column in self.columns if column.heading and kept(column)]
        left = next((n for n, column in enumerate(columns) if not column.text), len(columns))
        cells = [[each.cell(line.values[each.name]) for each in columns] for line in lines]
        return [column.heading for column in columns], cells, left

    def to_rich(self, lines: Sequence[Line]) -> RichTable:
        """For the terminal, without hidden columns."""
        return tables.to_rich(*self._shown(lines, lambda column: not column.hidden))

    def to_markdown(self, lines: Sequence[Line]) -> str:
        """For a README."""
        return tables.to_markdown(*self._shown(lines, lambda column: True))

    def to_csv(self, lines: Sequence[Line]) -> str:
        """As CSV, with 12 digits."""
        columns = [column for column in self.columns if column.in_csv]
        rows = [
            [column.csv_fields(line.values[column.name]) for column in columns] for line in lines
        ]
        widest = [
            max((list(fields[place]) for fields in rows), key=len, default=[column.name])
            for place, column in enumerate(columns)
        ]
        names = [name for each in widest for name in each]
        flat = [{name: value for each in fields for name, value in each.items()} for fields in rows]
        return tables.to_csv(names, [[row.get(name, math.nan) for name in names] for row in flat])
