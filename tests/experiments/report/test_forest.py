"""The chart of estimates around 0, and what `finish` adds to panels."""

import math
from typing import Any

import pytest

from experiments.report.charts import charts
from experiments.report.finished import finished
from experiments.study.figure import Lines
from experiments.study.forest import Forest, Panel
from experiments.study.panels import Axis
from tests.experiments.report.figures import compiled, layers, results, runs

VALUES = {
    "inside": (0.25, 0.125, 0.5, "agreed"),
    "right": (3.0, 0.5, 4.0, "refuted"),
    "left": (-math.inf, -math.inf, math.inf, "diverged"),
    "lost": (math.nan, math.nan, math.nan, "diverged"),
    "single": (0.5, math.nan, math.nan, "agreed"),
    "absent": None,
}
MADE = results(*(runs([[1.0]], method=name) for name in VALUES))
FOREST = Forest(
    file="f.png", caption="Exponents", by="method", within="split",
    group=lambda line: "all",
    panels=[Panel("first", "slower →", lambda line: VALUES[line["method"]])],
    colors={"agreed": "tab:green", "refuted": "tab:red", "diverged": "black"},
    margin=0.2, limit=1.0,
)  # fmt: skip


def test_estimates_are_cut_at_the_limit_and_say_so(capfd: pytest.CaptureFixture[str]) -> None:
    (chart,) = charts(FOREST, MADE)
    rows = {row["name"]: row for row in chart.rows if "x" in row}
    cells = {name: (row["x"], row["low"], row["high"], row["beyond"]) for name, row in rows.items()}
    assert cells == {
        "inside": (0.25, 0.125, 0.5, ""),
        "right": (1.0, 0.5, 1.0, "right of the axis"),
        "left": (-1.0, None, None, "left of the axis"),
        "lost": (None, None, None, ""),
        "single": (0.5, None, None, ""),
    }
    assert (rows["right"]["value"], rows["left"]["value"]) == (3.0, None)
    (shapes,) = [each["encoding"]["shape"] for each in layers(chart) if "shape" in each["encoding"]]
    assert [each["value"] for each in shapes["condition"]] == ["triangle-left", "triangle-right"]
    assert compiled(chart)["marks"] and capfd.readouterr().err == ""


def test_rules_bands_and_texts_are_read_from_a_finished_panel(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def finish(axes: Any, results: Any, keys: Any) -> None:
        for rule in (2.5, 2.5, math.nan):  # Drawn once; a target that no reference has is not.
            axes.axhline(rule)
        axes.axvline(1.5)
        axes.axhspan(1, 7)
        axes.text(0.25, 0.75, keys["split"], transform=axes.transAxes, color="red")

    figure = Lines(file="f.png", caption="Loss", by="method", x=(Axis("step", "steps", log=False),),
                   y=Axis("loss", "loss", log=False), finish=finish, across=("split",))  # fmt: skip
    rows, legend, ends = finished(figure, results(), {"split": "iid"})
    assert [row["rule"] for row in rows if "rule" in row] == [2.5]
    assert [row["vertical"] for row in rows if "vertical" in row] == [1.5]
    assert [(row["from"], row["to"]) for row in rows if "from" in row] == [(1, 7)]
    (inside,) = [row for row in rows if "text" in row]
    assert [inside[name] for name in ("panel", "text", "right", "up", "color")] == [
        "iid", "iid", 0.25, 0.75, "#ff0000"]  # fmt: skip
    assert (legend, ends) == ({}, (None, None))
    (chart,) = charts(figure, results(*(runs([[2.0, 1.0]], split=s) for s in ("iid", "skewed"))))
    assert [row["text"] for row in chart.rows if row.get("right")] == ["iid", "skewed"]
    # The rule is above all data.
    assert {row["extent"] for row in chart.rows if "extent" in row} == {1.0, 2.5}
    assert compiled(chart)["marks"] and capfd.readouterr().err == ""
