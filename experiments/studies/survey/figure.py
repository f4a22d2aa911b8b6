"""The figure of a survey: test loss against bytes, with a numbered point per method."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import Bbox

from experiments.methods import BASELINE, KINDS
from experiments.studies.survey.table import Row, summarize
from experiments.study.drawing import require, save, set_log_scale
from experiments.study.labels import Label, place_labels
from experiments.training.optimizers import OPTIMIZER_TITLES

NAME = "test_loss_against_bytes.png"
COLORS = dict(zip(KINDS, matplotlib.colormaps["tab10"].colors, strict=False))


def _draw_optimizer(axes: Axes, optimizer: str, rows: Sequence[Row]) -> None:
    """Plots a point per method, a cross if it loses; the band is the spread of the mean."""
    for row in rows:
        axes.plot(
            row.bytes_ratio,
            row.test_loss,
            "X" if row.loses else "o",
            color=COLORS[row.kind],
            markersize=6,
        )
        if row.method == BASELINE:
            axes.axhline(row.test_loss, color="black", linestyle=":", linewidth=1)
            low, high = (row.test_loss + sign * row.test_loss_sd for sign in (-1, 1))
            axes.axhspan(max(low, 1e-9), high, color="black", alpha=0.06, linewidth=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
    set_log_scale(axes)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(FuncFormatter(only_leading_digits))
    axes.set_xlabel("bytes sent, relative to the float32 mean")
    axes.set_ylabel("test loss")
    axes.set_title(OPTIMIZER_TITLES.get(optimizer, optimizer), size=10)
    axes.grid(which="major", alpha=0.25)


def only_leading_digits(value: float, _: int) -> str:
    """Labels 0.2 and 0.5 between 0.1 and 1, and no others."""
    return f"{value:g}" if f"{value:e}"[0] in "25" else ""


def _number(axes: Axes, rows: Sequence[Row], numbers: dict[str, int]) -> None:
    pixels = axes.transData.transform([(row.bytes_ratio, row.test_loss) for row in rows])
    place_labels(
        axes,
        [
            Label(
                str(numbers[row.method]),
                row.bytes_ratio,
                row.test_loss,
                [0.75 * part for part in COLORS[row.kind]],
            )
            for row in sorted(rows, key=lambda row: -row.test_loss)
        ],
        [Bbox.from_extents(x - 7, y - 7, x + 7, y + 7) for x, y in pixels],
    )


def _key(figure: Figure, rows: Sequence[Row], numbers: dict[str, int]) -> None:
    """The legends: methods by number, and kinds by color."""
    colors = {row.method: COLORS[row.kind] for row in rows}
    figure.legend(
        [Line2D([], [], color=colors[method], marker="o", linestyle="") for method in numbers],
        [f"{number} {method}" for method, number in numbers.items()],
        loc="upper right",
        bbox_to_anchor=(0.995, 0.97),
        ncols=2,
        fontsize=7,
        frameon=False,
        handletextpad=0.1,
        columnspacing=0.8,
        title="circles: not significantly worse than `mean`; crosses: worse",
        title_fontsize=8,
    )
    kinds = [kind for kind in KINDS if any(row.kind == kind for row in rows)]
    figure.legend(
        [Line2D([], [], color=COLORS[kind], marker="s", linestyle="") for kind in kinds],
        [KINDS[kind] for kind in kinds],
        loc="lower right",
        bbox_to_anchor=(0.995, 0.02),
        ncols=2,
        fontsize=7,
        frameon=False,
    )


def draw(folder: Path, runs: Sequence[dict[str, Any]], tuning: Sequence[dict[str, Any]]) -> Path:
    """Draws the rows of `metrics.jsonl`, one panel per optimizer; returns the path.

    Methods that diverged, or without a run of `mean`, have no point.

    Raises:
      ExperimentError: If there are no points.
    """
    rows = [
        row
        for row in summarize(require(runs, folder, "finished run"), tuning)
        if math.isfinite(row.test_loss) and math.isfinite(row.bytes_ratio)
    ]
    require(rows, folder, "finished run beside one of `mean`")
    numbers = {method: n for n, method in enumerate(dict.fromkeys(r.method for r in rows), 1)}
    optimizers = [*dict.fromkeys(row.optimizer for row in rows)]
    width = 7.5 * len(optimizers) + 4.5
    figure = Figure(figsize=(width, 7))
    FigureCanvasAgg(figure)
    panels = figure.subplots(
        1,
        len(optimizers),
        squeeze=False,
        gridspec_kw={"left": 0.6 / width, "right": 1 - 4.7 / width, "bottom": 0.08, "top": 0.95},
    )[0]
    for axes, optimizer in zip(panels, optimizers, strict=True):
        of_optimizer = [row for row in rows if row.optimizer == optimizer]
        _draw_optimizer(axes, optimizer, of_optimizer)
        _number(axes, of_optimizer, numbers)
    _key(figure, rows, numbers)
    return save(figure, folder / NAME)
