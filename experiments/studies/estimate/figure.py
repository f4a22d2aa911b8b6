"""The figure of an estimate: error against bits per coordinate."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from matplotlib.transforms import Bbox

from experiments.methods import parse_variant
from experiments.studies.estimate.table import EXACT, Row, summarize
from experiments.study.drawing import save
from experiments.study.labels import Label, place_labels

NAME = "error_against_bits.png"
TICKS = (0.5, 1, 2, 4, 8, 16, 32, 64, 128)


def _curves(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The variants of each method, sorted by bits."""
    curves: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.bits_per_coordinate):
        curves.setdefault(parse_variant(row.method).method, []).append(row)
    return curves


def _occupied(axes: Axes, curve: Sequence[Row]) -> Iterator[Bbox]:
    """Boxes, in pixels, around the points and along the lines of a curve."""
    pixels = axes.transData.transform
    ends = pixels([(row.bits_per_coordinate, row.error) for row in curve])
    for (x, y), row in zip(ends, curve, strict=True):
        bar = [(row.bits_per_coordinate, end) for end in (row.min_error, row.max_error)]
        (_, low), (_, high) = pixels(bar)
        yield Bbox.from_extents(x - 9, min(low, y - 9), x + 9, max(high, y + 9))
    for start, end in itertools.pairwise(ends):
        for part in np.linspace(0, 1, 40):
            x, y = start + part * (end - start)
            yield Bbox.from_extents(x - 2, y - 2, x + 2, y + 2)


def _label(axes: Axes, curves: Mapping[str, Sequence[Row]], colors: Mapping[str, Any]) -> None:
    """Labels each point."""
    # From top to bottom, so the labels of nearby points are in the order of the points.
    rows = sorted(itertools.chain(*curves.values()), key=lambda row: -row.error)
    families = [parse_variant(row.method).method for row in rows]
    place_labels(
        axes,
        [
            Label(
                row.method,
                row.bits_per_coordinate,
                row.error,
                [0.75 * part for part in colors[family]],
            )
            for row, family in zip(rows, families, strict=True)
        ],
        [box for curve in curves.values() for box in _occupied(axes, curve)],
    )


def _draw_curve(axes: Axes, curve: Sequence[Row], color: Any, is_control: bool) -> None:
    below = [max(0.0, row.error - row.min_error) for row in curve]
    above = [max(0.0, row.max_error - row.error) for row in curve]
    axes.errorbar(
        [row.bits_per_coordinate for row in curve],
        [row.error for row in curve],
        yerr=(below, above),
        color=color,
        marker="X" if is_control else "o",
        markersize=6,
        zorder=4 if is_control else 3,
        linewidth=1,
        linestyle="--",
        capsize=2,
    )


def _mark_exact(axes: Axes, exact: Sequence[Row]) -> None:
    """A line at the bits of the exact methods, whose error a logarithmic axis cannot show."""
    bits = min(row.bits_per_coordinate for row in exact)
    axes.axvline(bits, color="black", linestyle=":", linewidth=1)
    axes.text(
        1.04 * bits,
        0.02,
        "exact: " + ", ".join(row.method for row in exact),
        transform=axes.get_xaxis_transform(),
        rotation=90,
        va="bottom",
        fontsize=8,
    )


def draw(folder: Path, estimates: Sequence[dict[str, Any]]) -> Path:
    """Draws the rows of `metrics.jsonl`; returns the path of the figure."""
    rows = summarize(estimates)
    exact = [row for row in rows if row.error <= EXACT]
    curves = _curves([row for row in rows if row.error > EXACT])
    palette = itertools.cycle(matplotlib.colormaps["tab10"].colors)
    colors = dict(zip(curves, palette, strict=False))
    figure = Figure(figsize=(9, 6.4))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.09, 0.1, 0.88, 0.83))
    for family, curve in curves.items():
        _draw_curve(axes, curve, colors[family], parse_variant(family).is_control)
    axes.set_xscale("log")
    axes.set_yscale("log")
    bits = [row.bits_per_coordinate for row in rows]
    axes.set_xlim(0.6 * min(bits), 1.8 * max(bits))
    axes.set_xticks([tick for tick in TICKS if 0.6 * min(bits) <= tick <= 1.8 * max(bits)])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("bits sent per coordinate and worker")
    axes.set_ylabel("E‖G - mean‖² / ‖mean‖²")
    axes.set_title("Error of the mean: average and range over steps (crosses: controls)", size=10)
    axes.grid(which="major", alpha=0.25)
    if exact:
        _mark_exact(axes, exact)
    _label(axes, curves, colors)
    return save(figure, folder / NAME)
