"""Tidy rows: the one schema of the metrics of all studies, one JSON object per line.

- `point`: a logged point of a run, such as the loss after a step.
- `run`: the end of a run.
- `trial`: one run of the tuning, with its validation loss.
- `fact`: a measurement that no seed changes, such as the bytes of a method. `about` names it.

Every row has `schema`, `kind`, the keys of its setting (such as `graph` and `method`), `seed`
(except for facts), the tuned parameters and the measured values.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

SCHEMA = 1
LARGEST = 1e30
"""The largest magnitude in a row. Its square, and sums of such squares, are finite."""

Kind = Literal["point", "run", "trial", "fact"]
Row = dict[str, Any]

_NEW_KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(("step", "gossip", "straggler", "pace"), "point"),
    **dict.fromkeys(("run", "gossip_run", "straggler_run", "pace_run", "estimate"), "run"),
    **dict.fromkeys(("tuning", "straggler_tuning"), "trial"),
    **dict.fromkeys(("sparse", "density"), "fact"),
}
"""The kinds of records that were written before the schema."""

_SEEDS: Mapping[str, Any] = {
    "estimate": lambda row: row["step"],  # The gradients of a step are what is repeated.
    "straggler_tuning": lambda row: 1000,
}
"""The seeds of old kinds without a column `seed`."""


def is_missing(value: Any) -> bool:
    """Whether a value is None or NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def plain(value: Any) -> Any:
    """The value as it is read back from a record: no NumPy types, and NaN if it diverged."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not abs(value) <= LARGEST:
        return math.nan
    return [plain(each) for each in value] if isinstance(value, tuple | list) else value


def make_row(kind: Kind, keys: Mapping[str, Any], values: Mapping[str, Any]) -> Row:
    """A row of the keys and the values.

    Raises:
      ValueError: If a value has the name of a key or of a column of the schema.

    Example:
      >>> make_row("run", {"method": "mean", "seed": 0}, {"train_loss": 0.5})
      {'schema': 1, 'kind': 'run', 'method': 'mean', 'seed': 0, 'train_loss': 0.5}
    """
    row: Row = {"schema": SCHEMA, "kind": kind}
    for name, value in (*keys.items(), *values.items()):
        if name in row:
            raise ValueError(f"`{name}` is the name of more than one column of a row.")
        row[name] = plain(value)
    return row


def migrate(rows: Iterable[Row]) -> list[Row]:
    """Rows of any record in the schema; rows of unknown kinds are unchanged.

    Example:
      >>> migrate([{"kind": "gossip_run", "method": "dpsgd", "seed": 0}])
      [{'schema': 1, 'kind': 'run', 'method': 'dpsgd', 'seed': 0}]
    """
    migrated = []
    for row in rows:
        old, new = row["kind"], dict(row)
        if "schema" not in row and old in _NEW_KINDS:
            new = {"schema": SCHEMA, **row, "kind": _NEW_KINDS[old]}
            if old in _SEEDS:
                new.setdefault("seed", _SEEDS[old](row))
            if new["kind"] == "fact":
                new["about"] = old
        migrated.append(new)
    _add_edges(migrated)
    return migrated


def _add_edges(rows: Sequence[Row]) -> None:
    """Adds what the search found to runs of older records, which tuned only the learning rate."""
    trials = of_kind(rows, "trial")
    for run in of_kind(rows, "run") if trials else ():
        if "at_edge" in run or "learning_rate" not in run:
            continue
        rates = [
            trial["learning_rate"]
            for trial in trials
            if all(
                run.get(n) == key for n, key in trial.items() if n != "kind" and type(key) is str
            )
        ]
        is_edge = len({*rates}) > 1 and run["learning_rate"] in (min(rates), max(rates))
        run |= {"at_edge": "learning_rate" if is_edge else "", "trials": len(rates)}


def of_kind(rows: Iterable[Row], kind: Kind) -> list[Row]:
    """The rows of one kind."""
    return [row for row in rows if row["kind"] == kind]


def grouped(rows: Iterable[Row], names: Sequence[str]) -> dict[tuple, list[Row]]:
    """Groups rows by their values of `names`, in the order of first occurrence.

    Rows without one of these columns are in no group.

    Example:
      >>> [*grouped([{"a": 2, "b": 1}, {"a": 1}, {"a": 2, "b": 3}], ["a"])]
      [(2,), (1,)]
    """
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        if all(name in row for name in names):
            groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def identity(row: Mapping[str, Any], names: Sequence[str]) -> tuple:
    """What distinguishes a row from others of its kind: its keys, seed and parameters."""
    return (row["kind"], *(row.get(name) for name in names), row.get("seed"))
