"""The figure of a comparison of stragglers: training loss against simulated seconds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from experiments.methods.stragglers import BLOCKING_FORM
from experiments.studies.stragglers.table import add_times
from experiments.study.drawing import require, save, set_log_scale

NAME = "loss_against_seconds.png"
_COLORS = matplotlib.colormaps["tab10"].colors
_POINTS = 60


def _curve(axes: Axes, rows: Sequence[dict[str, Any]], style: dict[str, Any]) -> None:
    """Plots the median over seeds of the last logged loss, at `_POINTS` times."""
    seeds = {row["seed"] for row in rows}
    each = [[row for row in rows if row["seed"] == seed] for seed in sorted(seeds)]
    start = max(of_seed[0]["seconds"] for of_seed in each)
    end = min(of_seed[-1]["seconds"] for of_seed in each)
    moments = np.geomspace(start, end, _POINTS)
    losses = [
        np.array([row["train_loss"] for row in of_seed])[
            np.searchsorted([row["seconds"] for row in of_seed], moments, side="right") - 1
        ]
        for of_seed in each
    ]
    axes.plot(moments, np.median(losses, axis=0), **style)


def draw(folder: Path, rows: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]]) -> Path:
    """Draws the rows of `metrics.jsonl`; returns the path of the figure.

    Raises:
      ExperimentError: If no run has finished.
    """
    losses = {
        run["dataset"]: run["loss"]
        for run in add_times(rows, require(runs, folder, "finished run"))
    }
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    speeds = list(dict.fromkeys(row["speeds"] for row in rows))
    order = list(dict.fromkeys(row["strategy"] for row in rows))
    waiting = [name for name in order if name not in BLOCKING_FORM]
    figure = Figure(figsize=(1 + 3.4 * len(speeds), 1.2 + 3 * len(datasets)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(datasets), len(speeds), squeeze=False, sharey="row")
    for (row_index, dataset), (column, kind) in (
        (a, b) for a in enumerate(datasets) for b in enumerate(speeds)
    ):
        axes = grid[row_index, column]
        for strategy in order:
            strategy_rows = [
                row
                for row in rows
                if (row["dataset"], row["speeds"], row["strategy"]) == (dataset, kind, strategy)
            ]
            blocking = BLOCKING_FORM.get(strategy, strategy)
            number = waiting.index(blocking) if blocking in waiting else len(waiting)
            style = {
                "color": _COLORS[number % len(_COLORS)],
                "label": strategy,
                "linewidth": 1.2,
                "linestyle": "--",
            }
            if strategy in BLOCKING_FORM:
                finishes_late = strategy.endswith("late")
                style |= {"linewidth": 1.8, "linestyle": ":" if finishes_late else "-"}
            if strategy_rows:
                _curve(axes, strategy_rows, style)
        if dataset in losses:
            axes.axhline(losses[dataset], color="black", linewidth=0.6)
        axes.set_title(f"{dataset}, {kind}", size=10)
    for line in grid:
        set_log_scale(*line)
    for axes in grid.flat:
        if axes.get_yscale() == "log":
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
        axes.grid(which="both", alpha=0.2)
    for axes in grid[-1]:
        axes.set_xlabel("simulated seconds")
    for axes in grid[:, 0]:
        axes.set_ylabel("training loss")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return save(figure, folder / NAME)
