"""Figures as specifications: what is drawn, read from the panels, and the written file."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from matplotlib.text import Text

from experiments.cli.errors import ExperimentError
from experiments.study import drawing, panels
from experiments.study import figure as module
from experiments.study.claims import Results
from experiments.study.columns import Column, Table, key
from experiments.study.figure import Lines, Points
from experiments.study.groups import first, spread
from experiments.study.panels import Axis
from experiments.study.statistics import confidence_interval
from experiments.study.tidy import make_row

TABLE = Table(
    ("split", "method"),
    (key("split"), key("method"), Column("loss", spread("loss")), Column("bytes", first("bytes"))),
)
STEPS, METHODS = (1, 2, 4), ("mean", "top")


def loss(split: str, method: str, seed: int, step: int) -> float:
    return (1 + (split == "skewed")) * (2 + (method == "top")) * (1 + seed / 4) / step


def make_results(seeds: int = 3) -> Results:
    rows = []
    for split in ("iid", "skewed"):
        for method in METHODS:
            for seed in range(seeds):
                keys = {"split": split, "method": method, "seed": seed}
                for step in STEPS:
                    values = {"step": step, "seconds": step * (1 + seed / 10)}
                    values["loss"] = loss(split, method, seed, step)
                    rows.append(make_row("point", keys, values))
                sent = 1000.0 if method == "mean" else 10.0
                rows.append(make_row("run", keys, {"loss": values["loss"], "bytes": sent}))
    return Results(None, rows, TABLE.lines(rows))


X, SECONDS, LOSS = Axis("step", "steps", log=False), Axis("seconds", "s"), Axis("loss", "loss")
COMMON: dict[str, Any] = {"file": "figure.png", "caption": "Loss", "by": "method"}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved."""
    figures: list[Any] = []
    save = module.save
    monkeypatch.setattr(drawing, "DPI", 10)
    monkeypatch.setattr(module, "save", lambda f, path: (figures.append(f), save(f, path))[1])
    return figures


def test_lines_are_means_with_intervals(tmp_path: Path, drawn: list[Any]) -> None:
    lines = Lines(**COMMON, x=(X,), y=LOSS, across=("split",))
    path = lines.draw(tmp_path, make_results())
    assert path == tmp_path / "figure.png" and imread(path).shape[2] == 4
    axes = drawn[0].axes
    assert [each.get_title() for each in axes] == ["iid", "skewed"]
    for panel, split in zip(axes, ("iid", "skewed"), strict=True):
        assert [line.get_label() for line in panel.lines] == [*METHODS]
        assert panel.get_yscale() == "log" and panel.get_xscale() == "linear"
        for line, band, method in zip(panel.lines, panel.collections, METHODS, strict=True):
            values = [[loss(split, method, seed, step) for seed in range(3)] for step in STEPS]
            np.testing.assert_allclose(line.get_xdata(), STEPS)
            np.testing.assert_allclose(line.get_ydata(), np.mean(values, axis=1))
            top = band.get_paths()[0].vertices[:, 1].max()
            assert top == pytest.approx(confidence_interval(values[0]).high)
    legend = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert legend == [*METHODS]


def test_every_axis_and_every_key_has_panels(tmp_path: Path, drawn: list[Any]) -> None:
    placed: list[dict[str, Any]] = [{"across": ("split",)}, {"down": ("split",)}]
    for keys in placed:
        Lines(**COMMON, x=(X, SECONDS), y=LOSS, **keys).draw(tmp_path, make_results())
    across, down = ([(axes.get_title(), axes.get_xlabel()) for axes in f.axes] for f in drawn)
    assert across == [(split, label) for label in ("steps", "s") for split in ("iid", "skewed")]
    assert down == [(split, label) for split in ("iid", "skewed") for label in ("steps", "s")]
    np.testing.assert_allclose(drawn[1].axes[1].lines[0].get_xdata(), np.multiply(STEPS, 1.1))


def test_runs_without_common_points_are_sampled(tmp_path: Path, drawn: list[Any]) -> None:
    lines = Lines(**COMMON, x=(SECONDS,), y=LOSS, down=("split",), at=None, center="median")
    lines.draw(tmp_path, make_results())
    line = drawn[0].axes[0].lines[0]
    x, y = line.get_xdata(), line.get_ydata()
    assert (x[0], x[-1]) == pytest.approx((1.2, 4.0))  # The last to begin, and the first to end.
    for moment, height in zip(x, y, strict=True):
        last = [
            max(step for step in STEPS if step * (1 + seed / 10) <= moment) for seed in range(3)
        ]
        values = [loss("iid", "mean", seed, step) for seed, step in enumerate(last)]
        assert height == pytest.approx(np.median(values))


def test_points_are_the_lines_of_the_table(tmp_path: Path, drawn: list[Any]) -> None:
    mark = panels.colored("split", crossed="is_top")
    columns = (*TABLE.columns, Column("is_top", lambda group: group.keys["method"] == "top"))
    rows = make_results().rows
    results = Results(None, rows, dataclasses.replace(TABLE, columns=columns).lines(rows))
    common: dict[str, Any] = {**COMMON, "x": Axis("bytes", "kB", 1e-3), "y": LOSS}
    for numbered in (False, True):
        points = Points(**common, across=("split",), mark=mark, numbered=numbered)
        points.draw(tmp_path, results)
        panel = drawn[-1].axes[0]
        of_points = [line for line in panel.lines if line.get_marker() in "Xo"]
        expected = [(line["bytes"] / 1e3, line["loss"].mean) for line in results.lines]
        assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in of_points] == expected[:2]
        assert [line.get_marker() for line in of_points] == ["o", "X"]
        texts = {text.get_text() for text in panel.findobj(Text)}
        assert ({"1", "2"} if numbered else {"mean", "top"}) <= texts
        assert panel.get_xscale() == panel.get_yscale() == "log"
    assert [text.get_text() for text in drawn[1].legends[0].texts] == ["1 mean", "2 top"]
    colors = [mark(line)["color"] for line in results.lines]
    assert colors[0] == colors[1] != colors[2]


def test_a_record_without_rows_has_no_figure_and_diverged_runs_have_one(tmp_path: Path) -> None:
    rows = [{**row, "loss": math.nan} if row["method"] == "top" else row
            for row in make_results().rows]  # fmt: skip
    for figure in (Lines(**COMMON, x=(X,), y=LOSS), Points(**COMMON, x=Axis("bytes", "B"), y=LOSS)):
        figure.draw(tmp_path, Results(None, rows, TABLE.lines(rows)))
        with pytest.raises(ExperimentError, match=r"figure.png has no row to draw"):
            figure.draw(tmp_path, Results(None, [], []))
