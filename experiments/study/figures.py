"""Figures, drawn only from the files of a record."""

import itertools
import re
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from experiments import studies
from experiments.cli.configs import Figures
from experiments.cli.errors import ExperimentError
from experiments.methods import BASELINE, parse_variant
from experiments.studies.stragglers import figure as straggler_figure
from experiments.studies.survey import figure as survey_figure
from experiments.study import command
from experiments.study.drawing import require, save, set_log_scale
from experiments.study.record import read_metrics
from experiments.study.store import environment, read_settings
from experiments.training.optimizers import OPTIMIZER_TITLES

NAME = "loss_against_bytes.png"
MARKERS = "oDs^vPX*"


def _grouped(rows: list[dict[str, Any]], name: str) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row[name], []).append(row)
    return groups


def _curve(axes: Axes, rows: list[dict[str, Any]], label: str, style: dict[str, Any]) -> None:
    """Plots the mean over seeds at each logged step, and their range."""
    by_bytes = _grouped(rows, "bytes_sent")
    sent = np.array(list(by_bytes)) / 1e6
    losses = [[row["train_loss"] for row in group] for group in by_bytes.values()]
    axes.plot(sent, [np.mean(group) for group in losses], label=label, **style)
    axes.fill_between(
        sent,
        [min(group) for group in losses],
        [max(group) for group in losses],
        color=style["color"],
        alpha=0.15,
        linewidth=0,
    )


def _draw_optimizer(
    axes: Axes, optimizer: str, rows: list[dict[str, Any]], order: list[str]
) -> None:
    colors = itertools.cycle(matplotlib.colormaps["tab10"].colors)
    styles = dict(zip(order, zip(colors, itertools.cycle(MARKERS), strict=False), strict=False))
    for method, of_method in _grouped(rows, "method").items():
        color, marker = styles[method]
        style = {"color": color, "marker": marker, "markersize": 4, "linewidth": 1.2}
        if method == BASELINE:  # Other curves may cover it.
            style |= {"markersize": 9, "markerfacecolor": "none", "linewidth": 3}
        if parse_variant(method).is_control:
            style |= {"linestyle": "--"}
        _curve(axes, of_method, method, style)
    axes.set_xlabel("bytes sent per worker (MB)")
    axes.set_title(OPTIMIZER_TITLES.get(optimizer, optimizer))


def draw(folder: Path) -> Path:
    """Draws the figure of a record; returns its path.

    - `compare`, `train`: training loss against bytes sent, one panel per optimizer.
    - `survey`: test loss against bytes, one point per method.
    - `stragglers`: training loss against simulated seconds.

    Raises:
      ExperimentError: If the folder is not a record, or the record has no rows to draw.
    """
    if curves := read_metrics(folder, "straggler"):
        return straggler_figure.draw(folder, curves, read_metrics(folder, "straggler_run"))
    if trials := read_metrics(folder, "tuning"):
        return survey_figure.draw(folder, read_metrics(folder, "run"), trials)
    rows = require(read_metrics(folder, "step"), folder, "logged step")
    order = list(_grouped(rows, "method"))
    panels = _grouped(rows, "optimizer")
    figure = Figure(figsize=(1.5 + 4.5 * len(panels), 4.2), layout="constrained")
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (optimizer, of_optimizer) in zip(all_axes, panels.items(), strict=True):
        _draw_optimizer(axes, optimizer, of_optimizer, order)
    set_log_scale(*all_axes)
    for axes in all_axes:
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.grid(which="both", alpha=0.2)
    all_axes[0].set_ylabel("loss over the whole training set")
    handles, labels = all_axes[0].get_legend_handles_labels()
    seeds = len({row["seed"] for row in rows})
    figure.legend(
        handles,
        labels,
        loc="outside right upper",
        frameon=False,
        title=f"mean and range\nof {seeds} seed{'s' if seeds > 1 else ''}\n(dashed: controls)",
        alignment="left",
    )
    return save(figure, folder / NAME)


def study_of(folder: Path) -> str:
    """The name of the study of a record, of older records from their command.

    Raises:
      ExperimentError: If the record cannot be read.
    """
    if (folder / "config.json").exists() and (name := read_settings(folder).get("study")):
        return name
    typed = re.search(
        r"^command: .* -m experiments (?:launch .* -- )?(\w+)", environment(folder), re.M
    )
    name = typed[1] if typed else ""
    return {"compare": "digits"}.get(name, name)


def main(config: Figures) -> int:
    """Runs `python -m experiments figures`; returns the exit code."""
    folder = Path(config.folder)
    name = study_of(folder)
    if name in studies.names():
        study = studies.load(name)
        try:
            paths = command.draw(study, command.read_results(study, folder), folder)
        except ExperimentError:
            raise
        except Exception as error:  # A row may have a wrong value, or lack one.
            raise ExperimentError(f"{folder} cannot be drawn: {error!r}.") from error
    else:
        paths = [draw(folder)]
    print(*paths, sep="\n")
    return 0
