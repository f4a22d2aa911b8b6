"""The chart of points: lines of the table, their bars, and what colors and numbers mean."""

import math
from typing import Any

import pytest

from experiments.report.charts import charts
from experiments.study.columns import Column, Table, key
from experiments.study.figure import Points
from experiments.study.groups import Estimate, Spread
from experiments.study.panels import Axis
from tests.experiments.report.figures import compiled, layers, results, runs

LOSS = Axis("value", "loss")
COMMON: dict[str, Any] = {"file": "f.png", "caption": "Loss", "by": "method", "y": LOSS,
                          "x": Axis("at", "bytes", 10.0)}  # fmt: skip


def made(values: dict[str, tuple[float, Any]], **of_table: Any) -> Any:
    """A line of the table per method, with its place and its value."""
    table = Table(
        ("split", "method"),
        (key("split"), key("method"), Column("at", lambda group: values[group.keys["method"]][0]),
         Column("value", lambda group: values[group.keys["method"]][1])), **of_table,
    )  # fmt: skip
    return results(*(runs([[1.0], [2.0]], method=name) for name in values), table=table)


def drawn(chart: Any) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in chart.rows if "name" in row}


def test_points_and_bars_are_those_of_the_table(capfd: pytest.CaptureFixture[str]) -> None:
    """A bar that ends at most at 0 goes down to the end of an axis of logarithms."""
    results = made(
        {
            "number": (1.0, 3.0),
            "spread": (2.0, Spread(4.0, 0.5)),
            "below": (3.0, Spread(4.0, 4.5)),
            "one": (4.0, Spread(4.0, math.nan)),
            "interval": (5.0, Estimate(4.0, 3.0, 7.0)),
        }
    )
    (chart,) = charts(Points(**COMMON), results)
    rows = drawn(chart)
    assert {name: (row["x"], row["y"], row["low"], row["high"]) for name, row in rows.items()} == {
        "number": (10, 3, None, None),
        "spread": (20, 4, 3.5, 4.5),
        "below": (30, 4, None, 8.5),
        "one": (40, 4, None, None),
        "interval": (50, 4, 3, 7),
    }
    assert {row["run"] for row in rows.values()} == {"mean of 2"}
    to_end = [each for each in layers(chart) if each["encoding"].get("y2") == {"value": "height"}]
    assert len(to_end) == 1 and compiled(chart)["marks"] and capfd.readouterr().err == ""
    y = Axis("value", "loss", log=False)
    (chart,) = charts(Points(**{**COMMON, "y": y}), results)
    assert drawn(chart)["below"]["low"] == -0.5
    assert not [each for each in layers(chart) if each["encoding"].get("y2") == {"value": "height"}]


def test_a_line_without_a_place_has_no_point(capfd: pytest.CaptureFixture[str]) -> None:
    lost = (math.nan, math.inf, None, 0.0, -1.0, Spread(math.inf, math.nan))
    values = {f"lost {n}": (1.0, value) for n, value in enumerate(lost)}
    for kept in ({}, {"kept": (1.0, 2.0)}):
        (chart,) = charts(Points(**COMMON), made({**values, **kept}))
        assert [*drawn(chart)] == [*kept]
        assert compiled(chart)["marks"] and capfd.readouterr().err == ""
