"""Tables as specifications: groups, references, missing values, and what is shown."""

import csv
import io
import math
from typing import Any

import pytest
from rich.console import Console

from experiments.study.record import Row, make_row
from experiments.study.table import (
    SEEDS,
    Column,
    Estimate,
    Spread,
    Table,
    difference,
    fact_table,
    first,
    key,
    mean_of,
    over_reference,
    spread,
    tuned,
)

NAN = math.nan


def runs(graph: str, method: str, losses: Any, **values: Any) -> list[Row]:
    """Runs with the losses by seed."""
    keys = {"graph": graph, "method": method}
    return [make_row("run", {**keys, "seed": n}, {"loss": x, **values}) for n, x in losses.items()]


TABLE = Table(
    by=("graph", "method"),
    columns=(
        *map(key, ("graph", "method")),
        SEEDS,
        Column("loss", spread("loss"), ".2f"),
        Column("ratio", over_reference(mean_of("loss")), ".1f"),
        Column("percent", mean_of("loss"), ".0f", scale=100, hidden=True),
        Column("cost", first("bytes", "fact"), ",.0f", in_csv=False),
        Column("paired", difference("loss"), ".1f", in_csv=False),
        Column("rate", tuned("rate")),
    ),
    reference={"method": "mean"},
)
ROWS = [
    *runs("ring", "mean", {0: 1.0, 1: 3.0}),
    *runs("line", "top", {0: 9.0}),
    *runs("ring", "top", {1: 6.0}),
    make_row("fact", {"graph": "ring", "method": "top"}, {"bytes": 12345}),
    make_row("fact", {"about": "leaf"}, {"leaf": "bias", "shape": [2, 3], "bytes": 0.12345}),
]


def test_all_formats_have_the_same_values() -> None:
    """The mean of both seeds of the reference is 2, and that of the common seed 1 is 3."""
    lines = TABLE.lines(ROWS)
    assert TABLE.to_markdown(lines).splitlines() == [
        "| graph | method | loss | ratio | percent | cost | paired |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        "| ring | mean | 2.00 ± 1.41 | 1.0 | 200 | - | - |",
        "| line | top | 9.00 | - | 900 | - | - |",
        "| ring | top | 6.00 | 2.0 | 600 | 12,345 | 3.0 |",
    ]
    read = [*csv.DictReader(io.StringIO(TABLE.to_csv(lines)))]
    assert ",".join(read[0]) == "graph,method,seeds,loss,loss_sd,ratio,percent,rate"
    for line, cells in zip(lines, read, strict=True):
        values = {**line.values, "loss": line["loss"].mean, "loss_sd": line["loss"].sd}
        for name in ("seeds", "loss", "loss_sd", "ratio", "percent"):
            assert float(cells[name]) == pytest.approx(values[name], rel=1e-11, nan_ok=True)
        assert (cells["graph"], cells["method"], cells["rate"]) == (*line.group.keys.values(), "")
    Console(file=(text := io.StringIO()), width=100).print(TABLE.to_rich(lines))
    shown = text.getvalue()
    assert "2.00 ± 1.41" in shown and "nan" not in shown and "percent" not in shown
    assert fact_table(ROWS, "leaf").splitlines()[-1] == "| bias | 2 x 3 | 0.1235 |"
    adjacent = Table(TABLE.by, TABLE.columns, adjacent=("graph",))
    assert [line.where for line in adjacent.lines(ROWS)] == ["ring, mean", "ring, top", "line, top"]


def test_missing_seeds_ties_and_diverged_runs() -> None:
    _, unpaired = TABLE.lines([*runs("ring", "mean", {0: 1.0}), *runs("ring", "top", {1: 6.0})])
    assert unpaired.group.paired is None and math.isnan(unpaired["ratio"])
    losses = {0: 2.0, 1: 2.0, 2: NAN, 3: NAN, 4: 9.0}
    base = runs("ring", "mean", {0: 1.0, 1: 2.0, 2: 3.0, 3: NAN})
    _, top = TABLE.lines([*base, *runs("ring", "top", losses)])
    cells = {column.name: column.cell(top[column.name]) for column in TABLE.columns}
    assert (cells["loss"], cells["paired"]) == ("-", "diverged")
    loss = TABLE.columns[3]
    for value in (None, NAN, Spread(NAN, 1.0), Estimate(NAN, NAN, NAN)):
        assert loss.cell(value) == "-"
    assert loss.cell(Estimate(1.0, NAN, NAN)) == "1.00"
    assert loss.cell(Estimate(1.0, 0.5, 1.5)) == "1.00 [0.50, 1.50]"


def test_tuned_parameters_at_an_edge_are_marked() -> None:
    rows = runs("x", "a", {0: 1.0}, rate=0.10, k=2, at_edge="momentum, k")
    group = TABLE.lines(rows)[0].group
    assert (tuned("rate")(group), tuned("bits")(group)) == ("0.1", None)
    assert tuned("k")(group) == "2 (at the edge of the grid)"
