"""The chart of lines: its rows against values computed by hand, its legend, and its panels."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import vl_convert

from experiments.report.charts import charts
from experiments.study import figure as module
from experiments.study.figure import Lines
from experiments.study.panels import Axis, marked_style
from tests.experiments.report.figures import compiled, found, layers, results, runs, whole

STEP, LOSS = Axis("step", "steps", log=False), Axis("loss", "loss")
COMMON: dict[str, Any] = {"file": "f.png", "caption": "Loss", "by": "method", "x": (STEP,)}
T_3 = 4.302652729911275  # Student's, with 2 degrees of freedom, at 97.5 %.


def averages(chart: Any, **keys: Any) -> list[dict[str, Any]]:
    """The averages of a line, from left to right."""
    return [
        row
        for row in chart.rows
        if "x" in row and not row.get("single") and keys.items() <= row.items()
    ]


@pytest.mark.parametrize("losses", [[[4.0], [1.0], [3.0], [2.0]], [[5.0]]])
def test_a_median_is_that_of_the_seeds(losses: list[list[float]]) -> None:
    (chart,) = charts(Lines(**COMMON, y=LOSS, center="median"), results(runs(losses)))
    (row,) = averages(chart)
    values = [own for (own,) in losses]
    assert (row["y"], row["run"]) == (statistics.median(values), f"median of {len(losses)}")
    singles = [(each["run"], each["y"]) for each in chart.rows if each.get("single")]
    assert singles == [(f"seed {seed}", own) for seed, own in enumerate(values)]
    if len(losses) == 1:
        assert row["low"] == row["high"] == 5


def spread(values: Sequence[float], times: float) -> tuple[float, float]:
    center, sd = statistics.mean(values), statistics.stdev(values)
    return center - times * sd, center + times * sd


@pytest.mark.parametrize(
    ("band", "ends"),
    [
        ("range", lambda values: (min(values), max(values))),
        ("sd", lambda values: spread(values, 1)),
        ("interval", lambda values: spread(values, T_3 / math.sqrt(3))),
    ],
)
@pytest.mark.parametrize("log", [False, True])
def test_a_band_ends_where_the_seeds_say(band: Any, ends: Callable[..., Any], log: bool) -> None:
    """On an axis of logarithms, a lower end of at most 0 is a tenth of the center."""
    losses = [[1.0, 10.0], [1.0, 11.0], [7.0, 12.0]]
    y = Axis("loss", "loss", 10.0, log=log)
    (chart,) = charts(Lines(**COMMON, y=y, band=band), results(runs(losses)))
    for row, values in zip(averages(chart), zip(*losses, strict=True), strict=True):
        (low, high), center = ends(values), statistics.mean(values)
        low = max(low, center / 10) if log else low
        found = [row[name] for name in ("low", "y", "high")]
        assert found == pytest.approx([10 * low, 10 * center, 10 * high], rel=1e-5, abs=1e-4)


def test_a_line_has_a_gap_where_it_has_no_place(capfd: pytest.CaptureFixture[str]) -> None:
    """As a number that is not finite, or without a logarithm; and no value is no error."""
    rows = runs([[4.0, 3.0, math.nan, 2.0, 1.0]])
    (chart,) = charts(Lines(**COMMON, y=LOSS, banded=lambda name: False), results(rows))
    assert [row["y"] for row in averages(chart)] == [4, 3, None, 2, 1]
    svg = vl_convert.vegalite_to_svg(whole(chart))
    (path,) = [part.partition('d="')[2].partition('"')[0] for part in svg.split("<path")
               if 'aria-roledescription="line mark"' in part]  # fmt: skip
    assert path.count("M") == 2 and path.count("L") == 2
    (chart,) = charts(Lines(**COMMON, y=LOSS), results(runs([[0.0, -1.0, math.inf, 1.0]])))
    assert [row["y"] for row in averages(chart)] == [None, None, None, 1.0]
    for lost in ([], runs([[math.nan, math.nan]])):
        (chart,) = charts(Lines(**COMMON, y=LOSS), results(lost))
        assert all(row["y"] is None for row in chart.rows) and bool(lost) == bool(chart.rows)
        assert compiled(chart)["marks"] and capfd.readouterr().err == ""
    (chart,) = charts(Lines(**COMMON, y=LOSS), results(runs([[0.0, -1.0]])))
    types = {scale["type"] for scale in found(layers(chart)[0], "scale") if "type" in scale}
    assert types == {"linear"}


def test_the_legend_has_the_names_colors_and_dashes_of_the_png(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    figures: list[Any] = []
    save = module.save
    monkeypatch.setattr(module, "save", lambda f, path: (figures.append(f), save(f, path))[1])
    made = results(runs([[3.0, 2.0]]), runs([[2.0, 1.0]], method="top"),
                   runs([[2.0, 3.0]], method="rare", split="skewed"))  # fmt: skip
    figure = Lines(**COMMON, y=LOSS, across=("split",), style=marked_style("mean", ["top"]))
    figure.draw(tmp_path, made)
    (chart,) = charts(figure, made)
    texts = [text.get_text() for text in figures[0].legends[0].get_texts()]
    line = layers(chart)[0]["encoding"]
    assert line["color"]["scale"]["domain"] == texts == ["mean", "top", "rare"]
    dashed = [each.get_linestyle() == "--" for each in figures[0].legends[0].get_lines()]
    assert [each != [1, 0] for each in line["strokeDash"]["scale"]["range"]] == dashed
    (legend,) = compiled(chart)["legends"]
    assert {"stroke", "strokeDash"} <= legend.keys()
    assert (legend["title"], legend["symbolType"]) == ("method", "stroke")
    assert capfd.readouterr().err == ""
