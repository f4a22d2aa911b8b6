"""The figure of a comparison of sparse methods: held-out loss against sparse bytes."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import Bbox

from experiments.methods import BASELINE
from experiments.methods.sparse import ALL_GATHER, S2_METHODS
from experiments.studies.sparse.table import Row, summarize
from experiments.studies.survey.figure import only_leading_digits
from experiments.study.drawing import require, save, set_log_scale
from experiments.study.labels import Label, place_labels

NAME = "held_out_loss_against_sparse_bytes.png"
_COLORS = matplotlib.colormaps["tab10"].colors
_REFERENCE, _SKETCH, _OTHER = "black", _COLORS[0], _COLORS[1]


def _color(row: Row) -> Any:
    if row.method in (BASELINE, ALL_GATHER):
        return _REFERENCE
    return _SKETCH if row.method in S2_METHODS else _OTHER


def _draw_rows(axes: Axes, rows: Sequence[Row]) -> None:
    """Plots means with bars and a band of ± one standard deviation over seeds."""
    for row in rows:
        axes.errorbar(
            row.sparse_bytes / 1e3,
            row.test_loss,
            yerr=None if math.isnan(row.test_loss_sd) else row.test_loss_sd,
            marker="o" if row.is_within else "X",
            color=_color(row),
            ecolor=(*to_rgb(_color(row)), 0.35),
            markersize=7,
            capsize=2,
            linewidth=1,
        )
        if row.method == BASELINE:
            axes.axhline(row.test_loss, color="black", linestyle=":", linewidth=1)
            if not math.isnan(row.test_loss_sd):
                low, high = (row.test_loss + sign * row.test_loss_sd for sign in (-1, 1))
                axes.axhspan(low, high, color="black", alpha=0.07, linewidth=0)
    set_log_scale(axes, y=False)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(FuncFormatter(only_leading_digits))
    axes.tick_params(which="both", length=3, pad=5)
    axes.margins(0.12)
    axes.set_xlabel("kB of the sparse leaves that a worker sends in a step")
    axes.set_ylabel("held-out loss")
    axes.set_title(
        "circles: at most one standard deviation above the dense mean; crosses: more\n"
        "blue: S2 Reducer; black: dense all-reduce and sparse all-gather",
        size=9,
    )
    axes.grid(which="major", alpha=0.25)


def _dense_line(axes: Axes, rows: Sequence[Row]) -> list[Bbox]:
    """The box of the dotted line, which labels should not overlap."""
    frame = axes.get_window_extent()
    heights = [
        axes.transData.transform((row.sparse_bytes / 1e3, row.test_loss))[1]
        for row in rows
        if row.method == BASELINE
    ]
    return [Bbox.from_extents(frame.x0, y - 2, frame.x1, y + 2) for y in heights]


def draw(
    folder: Path,
    costs: Sequence[dict[str, Any]],
    runs: Sequence[dict[str, Any]],
    tuning: Sequence[dict[str, Any]],
) -> Path:
    """Draws the rows of `metrics.jsonl`; returns the path. Runs that diverged have no point.

    Raises:
      ExperimentError: If no run has finished.
    """
    rows = [
        row
        for row in summarize(costs, require(runs, folder, "finished run"), tuning)
        if math.isfinite(row.test_loss)
    ]
    require(rows, folder, "run of a finite loss")
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    _draw_rows(axes, rows)
    figure.draw_without_rendering()
    pixels = axes.transData.transform([(row.sparse_bytes / 1e3, row.test_loss) for row in rows])
    points = [Bbox.from_extents(x - 8, y - 8, x + 8, y + 8) for x, y in pixels.reshape(-1, 2)]
    place_labels(
        axes,
        [Label(row.method, row.sparse_bytes / 1e3, row.test_loss, _color(row)) for row in rows],
        [*points, *_dense_line(axes, rows)],
    )
    return save(figure, folder / NAME)
