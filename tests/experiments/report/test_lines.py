"""The chart of lines: its rows against values computed by hand."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import vl_convert

from experiments.report.charts import charts
from experiments.study.figure import Lines
from experiments.study.panels import Axis
from tests.experiments.report.figures import compiled, results, runs, whole

STEP, LOSS = Axis("step", "steps", log=False), Axis("loss", "loss")
COMMON: dict[str, Any] = {"file": "f.png", "caption": "Loss", "by": "method", "x": (STEP,)}
T_3 = 4.302652729911275  # Student's, with 2 degrees of freedom, at 97.5 %.


def averages(chart: Any) -> list[dict[str, Any]]:
    """The averages of a line, from left to right."""
    return [row for row in chart.rows if "x" in row and not row.get("single")]


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
    for losses, drawn in (
        ([4.0, 3.0, math.nan, 2.0, 1.0], [4, 3, None, 2, 1]),
        ([0.0, -1.0, math.inf, 1.0], [None, None, None, 1]),
        ([math.nan, math.nan], [None, None]),
    ):
        (chart,) = charts(
            Lines(**COMMON, y=LOSS, banded=lambda name: False), results(runs([losses]))
        )
        assert [row["y"] for row in averages(chart)] == drawn
        svg = vl_convert.vegalite_to_svg(whole(chart))
        paths = [part.partition('d="')[2].partition('"')[0] for part in svg.split("<path")
                 if 'aria-roledescription="line mark"' in part]  # fmt: skip
        if None not in (drawn[0], drawn[-1]):  # Two lines of two points each.
            assert [(path.count("M"), path.count("L")) for path in paths] == [(2, 2)]
    (chart,) = charts(Lines(**COMMON, y=LOSS), results())
    assert not chart.rows and compiled(chart)["marks"] and capfd.readouterr().err == ""
