"""The tables of all committed records, regenerated from their rows by specifications."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import experiments
from experiments.study.columns import Column, Table, key
from experiments.study.groups import (
    Group,
    Spread,
    Value,
    first,
    mean_of,
    spread,
)
from experiments.study.rows import read_rows
from experiments.study.statistics import mean, sd
from experiments.study.tidy import Row, grouped, migrate, of_kind

RECORDS = Path(experiments.__file__).parent / "records"


def at_edge(group: Group) -> bool:
    rates = {trial["learning_rate"] for trial in group.trials}
    return len(rates) > 1 and group.runs[0]["learning_rate"] in (min(rates), max(rates))


def rate(group: Group) -> str:
    return f"{group.runs[0]['learning_rate']:g}{' (edge)' if at_edge(group) else ''}"


def add_times(rows: Sequence[Row]) -> list[Row]:
    """Adds the seconds to the lowest loss that all finite runs of the dataset reach."""
    names = ("dataset", "speeds", "strategy", "seed")
    points = grouped(of_kind(rows, "point"), names)
    targets: dict[str, float] = {}
    for keys, (run,) in grouped(of_kind(rows, "run"), names).items():
        if math.isfinite(run["train_loss"]):
            lowest = min(point["train_loss"] for point in points[keys])
            targets[keys[0]] = max(lowest, targets.get(keys[0], -math.inf))

    def timed(row: Row) -> Row:
        if row["kind"] != "run":
            return row
        target = targets.get(row["dataset"], math.nan)
        reached = [
            point["seconds"]
            for point in points[tuple(row[name] for name in names)]
            if point["train_loss"] <= target
        ]
        seconds = min(reached, default=math.nan)
        diverged = not math.isfinite(row["train_loss"])
        return {**row, "loss": target, "seconds_to_loss": math.nan if diverged else seconds}

    return [timed(row) for row in rows]


def finite_times(group: Group) -> list[float]:
    return [time for time in group.values("seconds_to_loss") if math.isfinite(time)]


def per(total: str, count: str) -> Value:
    return lambda group: sum(group.values(total)) / sum(group.values(count))


STRAGGLERS = Table(
    by=("dataset", "speeds", "strategy"),
    columns=(
        key("dataset"),
        key("speeds"),
        key("strategy"),
        Column("rate", first("learning_rate"), "g"),
        Column("seconds to the loss", lambda g: Spread(mean(finite_times(g)), sd(finite_times(g))),
               ",.2f"),
        Column("reached", lambda g: f"{len(finite_times(g))}/{len(g.runs)}"),
        Column("seconds/step", per("seconds", "steps"), ".4f"),
        Column("mini-batches/s", per("minibatches", "seconds"), ",.0f"),
        Column("idle", mean_of("idle"), "g"),
        Column("test accuracy %", spread("test_accuracy"), ",.1f", scale=100),
    ),
    adjacent=("dataset", "speeds"),
)  # fmt: skip


def rows_of(study: str, derive: Callable[[list[Row]], list[Row]]) -> tuple[Path, list[Row]]:
    folder = max(RECORDS.glob(f"*_{study}"))
    return folder, derive(migrate(read_rows(folder / "metrics.jsonl")))


@pytest.mark.parametrize(
    ("study", "table", "derive"),
    [
        ("stragglers", STRAGGLERS, add_times),
    ],
)
def test_the_committed_table_is_regenerated(
    study: str, table: Table, derive: Callable[[list[Row]], list[Row]]
) -> None:
    folder, rows = rows_of(study, derive)
    regenerated = table.to_markdown(table.lines(rows))
    readme = (folder / "README.md").read_text()
    heading = regenerated.splitlines()[0]
    start = readme.index(heading)
    committed = readme[start : readme.index("\n\n", start) + 1]
    assert regenerated == committed.replace("| nan |", "| - |")
