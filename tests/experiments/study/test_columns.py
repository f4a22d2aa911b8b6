"""Tables as specifications: groups, references, missing values and the three renderings."""

import io
import math
from typing import Any

import pytest
from rich.console import Console

from experiments.study.columns import SEEDS, Column, Table, key
from experiments.study.groups import (
    Spread,
    deviations,
    first,
    mean_of,
    over,
    over_reference,
    spread,
    times_above,
)
from experiments.study.tidy import make_row

NAN = math.nan


def run(graph: str, method: str, seed: int, loss: float, **values: Any) -> dict[str, Any]:
    return make_row(
        "run", {"graph": graph, "method": method, "seed": seed}, {"loss": loss, **values}
    )


TABLE = Table(
    by=("graph", "method"),
    columns=(
        key("graph"),
        key("method"),
        SEEDS,
        Column("loss", spread("loss"), ".2f"),
        Column("ratio", over_reference(mean_of("loss")), ".1f"),
        Column("percent", mean_of("loss"), ".0f", scale=100, hidden=True),
        Column("cost", first("bytes", "fact"), ",.0f", in_csv=False),
    ),
    reference={"method": "mean"},
)
ROWS = [
    run("ring", "mean", 0, 1.0),
    run("ring", "mean", 1, 3.0),
    run("line", "top", 0, 9.0),
    run("ring", "top", 1, 6.0),
    make_row("fact", {"graph": "ring", "method": "top"}, {"bytes": 12345}),
    make_row("fact", {"leaf": "bias"}, {"bytes": 1}),
]


def test_one_code_path_renders_all_formats() -> None:
    lines = TABLE.lines(ROWS)
    assert TABLE.to_markdown(lines).splitlines() == [
        "| graph | method | loss | ratio | percent | cost |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        "| ring | mean | 2.00 ± 1.41 | 1.0 | 200 | - |",
        "| line | top | 9.00 | - | 900 | - |",
        "| ring | top | 6.00 | 2.0 | 600 | 12,345 |",
    ]
    assert TABLE.to_csv(lines).splitlines() == [
        "graph,method,seeds,loss,loss_sd,ratio,percent",
        "ring,mean,2,2.0,1.41421356237,1.0,2.0",
        "line,top,1,9.0,nan,nan,9.0",
        "ring,top,1,6.0,nan,2.0,6.0",
    ]
    terminal = TABLE.to_rich(lines)
    assert [column.header for column in terminal.columns] == [
        "graph", "method", "loss", "ratio", "cost"]  # fmt: skip
    assert [column.justify for column in terminal.columns] == ["left"] * 2 + ["right"] * 3
    text = io.StringIO()
    Console(file=text, width=100).print(terminal)
    assert "2.00 ± 1.41" in text.getvalue() and "nan" not in text.getvalue()


def test_a_ratio_is_over_the_runs_of_common_seeds() -> None:
    """The mean of both seeds of the reference is 2, that of seed 1 is 3."""
    *_, line = TABLE.lines(ROWS)
    assert line.values["ratio"] == 6 / 3 and line.where == "ring, top"
    assert line.group.reference.values("loss") == [1, 3]
    assert line.group.paired.values("loss") == [3]
    assert line.group.other(graph="line").values("loss") == [9]
    assert line.group.other(graph="star") is None
    _, apart = TABLE.lines([run("ring", "mean", 0, 1.0), run("ring", "top", 1, 6.0)])
    assert apart.group.paired is None and math.isnan(apart.values["ratio"])
    for value in (None, NAN, Spread(NAN, NAN), Spread(NAN, 1.0)):
        assert TABLE.columns[3].cell(value) == "-"
    adjacent = Table(TABLE.by, TABLE.columns, adjacent=("graph",))
    assert [line.where for line in adjacent.lines(ROWS)] == ["ring, mean", "ring, top", "line, top"]


def test_comparisons_of_ties_zeros_and_diverged_runs() -> None:
    rows = [run("ring", "mean", seed, loss) for seed, loss in enumerate((1.0, 2.0, 3.0, NAN))]
    rows += [run("ring", "top", seed, loss) for seed, loss in enumerate((2.0, 2.0, NAN, NAN, 9.0))]
    mean, top = (line.group for line in TABLE.lines(rows))
    assert (times_above("loss")(mean), times_above("loss")(top)) == (None, "2/4")
    equal = [run("ring", name, seed, 1.0) for name in ("mean", "top") for seed in (0, 1)]
    _, same = (line.group for line in TABLE.lines(equal))
    assert math.isnan(deviations("loss")(same))
    apart = [run("ring", name, seed, seed + (name == "top"))
             for name in ("mean", "top") for seed in (0.0, 1.0)]  # fmt: skip
    _, above = (line.group for line in TABLE.lines(apart))
    assert deviations("loss")(above) == pytest.approx(2**0.5)
    assert math.isnan(over(lambda group: 0, method="mean")(same))
