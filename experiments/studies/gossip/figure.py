"""The figure of a comparison of gossip: training loss against steps, and against rounds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.study.drawing import save, set_log_scale

NAME = "loss_against_steps_and_rounds.png"
_COLORS = matplotlib.colormaps["tab10"].colors


def _curves(axes: Axes, rows: Sequence[dict[str, Any]], against: str, order: list[str]) -> None:
    """Plots means over seeds; the methods of the claim have a band of ± a standard deviation."""
    for number, method in enumerate(order):
        of_method = [row for row in rows if row["method"] == method]
        if not of_method:
            continue
        steps = sorted({row["step"] for row in of_method})
        each = [[row for row in of_method if row["step"] == step] for step in steps]
        x = [np.mean([row[against] for row in at]) for at in each]
        mean = np.array([np.mean([row["train_loss"] for row in at]) for at in each])
        color, main = _COLORS[number % len(_COLORS)], number < 2
        axes.plot(x, mean, color=color, linewidth=2 if main else 1, label=method,
                  linestyle="-" if number < 3 else "--")  # fmt: skip
        if main:
            spread = np.array([np.std([row["train_loss"] for row in at]) for at in each])
            low = np.maximum(mean - spread, mean / 10)  # Positive, for the log scale.
            axes.fill_between(x, low, mean + spread, color=color, alpha=0.15, linewidth=0)


def draw(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Draws the rows of `metrics.jsonl`; returns the path of the figure."""
    panels = list(dict.fromkeys((row["graph"], row["split"]) for row in rows))
    order = list(dict.fromkeys(row["method"] for row in rows))
    figure = Figure(figsize=(1 + 3.4 * len(panels), 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, len(panels), squeeze=False, sharey=True)
    for column, (graph, split) in enumerate(panels):
        panel_rows = [row for row in rows if (row["graph"], row["split"]) == (graph, split)]
        for axes, against in zip(grid[:, column], ("step", "rounds"), strict=True):
            _curves(axes, panel_rows, against, order)
        grid[0, column].set_title(f"{graph}, {split}", size=10)
        grid[0, column].set_xlabel("steps")
        grid[1, column].set_xlabel("rounds of messages")
    set_log_scale(*grid.flat, x=False)
    for axes in grid.flat:
        axes.grid(which="both", alpha=0.2)
    for axes in grid[:, 0]:
        axes.set_ylabel("training loss of the mean model")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    return save(figure, folder / NAME)
