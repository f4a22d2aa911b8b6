"""Figures: what is drawn, read from the panels."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.text import Text
from scipy import stats

from experiments.errors import ExperimentError
from experiments.study import plot
from experiments.study.claims import Results
from experiments.study.plot import SAMPLES, Axis, Lines, Points
from experiments.study.table import Column, Table, first, key, spread

TABLE = Table(
    ("split", "method"),
    (
        *map(key, ("split", "method")),
        Column("loss", spread("loss")),
        Column("bytes", first("bytes")),
        Column("is_top", lambda group: group.keys["method"] == "top"),
    ),
)
STEPS, METHODS, SPLITS, SEEDS = (1, 2, 4), ("mean", "top"), ("iid", "skewed"), range(3)


def loss(step: int, split: str, method: str, seed: int) -> float:
    return (1 + (split == "skewed")) * (2 + (method == "top")) * (1 + seed / 4) / step


def seconds(step: int, seed: int) -> float:
    return step * (1 + seed / 10)


ROWS = [
    {"kind": kind, "split": split, "method": method, "seed": seed, "step": step,
     "seconds": seconds(step, seed), "loss": loss(step, split, method, seed), "bytes": 1e4}
    for split in SPLITS for method in METHODS for seed in SEEDS
    for kind, step in (*(("point", step) for step in STEPS), ("run", 4))
]  # fmt: skip
RESULTS = Results(None, ROWS, TABLE.lines(ROWS))
STEP, SECONDS, LOSS = Axis("step", "steps", log=False), Axis("seconds", "s"), Axis("loss", "", 2.0)
COMMON: dict[str, Any] = {"file": "figure.png", "caption": "Loss", "by": "method", "y": LOSS}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures, which are not saved."""
    figures: list[Any] = []
    monkeypatch.setattr(plot, "save", lambda figure, path: figures.append(figure))
    return figures


@pytest.mark.parametrize("options", [{}, {"band": lambda values: (min(values), max(values))}])
def test_lines_are_means_with_bands(tmp_path: Path, drawn: list[Any], options: Any) -> None:
    Lines(**COMMON, x=(STEP, SECONDS), across=("split",), **options).draw(tmp_path, RESULTS)
    axes = drawn[0].axes
    panels = [(panel.get_title(), panel.get_xlabel()) for panel in axes]
    assert panels == [(split, label) for label in ("steps", "s") for split in SPLITS]
    for panel, split in zip(axes[:2], SPLITS, strict=True):
        assert (panel.get_xscale(), panel.get_yscale()) == ("linear", "log")
        for line, area, method in zip(panel.lines, panel.collections, METHODS, strict=True):
            values = np.array([[2 * loss(step, split, method, n) for n in SEEDS] for step in STEPS])
            np.testing.assert_allclose(line.get_data(), (STEPS, values.mean(axis=1)))
            ends = values[0].min(), values[0].max()
            if not options:  # On a logarithmic axis, it ends at a tenth of the mean.
                center = values[0].mean()
                low, high = stats.t.interval(0.95, 2, center, stats.sem(values[0]))
                ends = max(low, center / 10), high
            at_first = area.get_paths()[0].vertices
            at_first = at_first[at_first[:, 0] == STEPS[0], 1]
            assert (at_first.min(), at_first.max()) == pytest.approx(ends)
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == [*METHODS]


def test_runs_without_common_points_are_sampled(tmp_path: Path, drawn: list[Any]) -> None:
    options: Any = {"down": ("split",), "at": None, "center": np.median, "only": {"top": "the top"}}
    Lines(**COMMON, **options, x=(SECONDS,)).draw(tmp_path, RESULTS)
    (line,) = drawn[0].axes[1].lines
    x, y = line.get_data()  # From the last to begin to the first to end.
    assert (x[0], x[-1], len(x)) == (pytest.approx(1.2), pytest.approx(4.0), SAMPLES)
    for moment, height in zip(x, y, strict=True):
        last = [max(step for step in STEPS if seconds(step, n) <= moment + 1e-9) for n in SEEDS]
        values = [2 * loss(step, "skewed", "top", n) for n, step in enumerate(last)]
        assert height == pytest.approx(np.median(values))


@pytest.mark.parametrize("numbered", [False, True])
def test_points_are_lines_of_the_table(tmp_path: Path, drawn: list[Any], numbered: bool) -> None:
    mark = lambda line: {"marker": "X" if line["is_top"] else "o", "color": "red"}  # noqa: E731
    options: Any = {"across": ("split",), "mark": mark}
    points = Points(**COMMON, **options, x=(Axis("bytes", "kB", 1e-3),), numbered=numbered)
    points.draw(tmp_path, RESULTS)
    found = [line for line in drawn[0].axes[1].lines if line.get_marker() in ("X", "o")]
    expected = [(10.0, 2 * line["loss"].mean) for line in RESULTS.lines[2:]]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in found] == expected
    assert [line.get_marker() for line in found] == ["o", "X"]
    texts = {text.get_text() for text in drawn[0].findobj(Text)}
    assert ({"1", "2", "1 mean", "2 top"} if numbered else {*METHODS}) <= texts


def test_a_record_without_rows_has_no_figure_and_diverged_runs_have_one(tmp_path: Path) -> None:
    rows = [{**row, "loss": math.nan} if row["method"] == "top" else row for row in ROWS]
    for figure in (Lines(**COMMON, x=(STEP,)), Points(**COMMON, x=(Axis("bytes", "B"),))):
        path = figure.draw(tmp_path, Results(None, rows, TABLE.lines(rows)))
        assert path.read_bytes().startswith(b"\x89PNG")
        with pytest.raises(ExperimentError, match=r"There is nothing to draw in figure\.png"):
            figure.draw(tmp_path, Results(None, [], []))
