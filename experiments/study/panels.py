"""What the figures of a study share: panels by keys, axes, styles and the legend."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from experiments.study.claims import Results
from experiments.study.columns import Line
from experiments.study.drawing import require
from experiments.study.tidy import Row, grouped

COLORS = matplotlib.colormaps["tab10"].colors
Style = Callable[[int, str], Mapping[str, Any]]
"""`(number, name) -> options of matplotlib` of a line, a bar or a point."""

Finish = Callable[[Axes, Results, Mapping[str, Any]], None]
"""`(axes, results, keys of the panel)`; adds to a panel."""


def plain_style(number: int, name: str) -> Mapping[str, Any]:
    """A color per name."""
    return {"color": COLORS[number % len(COLORS)]}


def marked_style(baseline: str, dashed: Sequence[str]) -> Style:
    """A color and a marker per name; the line of `baseline` is wide, since others may cover it."""

    def style(number: int, name: str) -> Mapping[str, Any]:
        marks = {"marker": "oDs^vPX*"[number % 8], "markersize": 4, "linewidth": 1.2}
        if name == baseline:
            marks |= {"markersize": 9, "markerfacecolor": "none", "linewidth": 3}
        return {**plain_style(number, name), **marks, "ls": "--" if name in dashed else "-"}

    return style


def set_plain_ticks(axes: Axes) -> None:
    """Plain numbers at logarithmic axes, with fewer of them the more an axis spans."""
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        if axis.get_scale() == "log":
            shown = "23456789" if high < 5 * low else "25" if high < 1000 * low else ""
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(
                FuncFormatter(
                    lambda value, _, shown=shown: f"{value:g}" if f"{value:e}"[0] in shown else ""
                )
            )


def colored(column: str, crossed: str) -> Callable[[Line], Mapping[str, Any]]:
    """A color per value of a column of the table; a cross if another is true, or else a circle."""
    numbers: dict[Any, int] = {}

    def mark(line: Line) -> Mapping[str, Any]:
        number = numbers.setdefault(line[column], len(numbers))
        return {"marker": "X" if line[crossed] else "o", "color": COLORS[number % len(COLORS)]}

    return mark


def color_legend(column: str, mark: Callable[[Line], Mapping[str, Any]]) -> Finish:
    """Adds a legend of the colors of `mark`, which belong to the values of a column."""

    def finish(axes: Axes, results: Results, keys: Mapping[str, Any]) -> None:
        colors = {line[column]: mark(line)["color"] for line in results.lines}
        squares = [Line2D([], [], color=c, marker="s", linestyle="") for c in colors.values()]
        axes.legend(squares, [*colors], fontsize=7)

    return finish


@dataclasses.dataclass(frozen=True)
class Axis:
    """A column on an axis.

    Attributes:
      name: The column.
      label: The text at the axis.
      scale: The factor of its values, such as 1e-6 for MB.
      log: Whether the axis is logarithmic, if it has values above 0.
    """

    name: str
    label: str
    scale: float = 1.0
    log: bool = True


def reference_band(name: str) -> Finish:
    """Marks the mean of a column of the reference by a line, and its standard deviation by a band.

    Args:
      name: The column, which is a spread.
    """

    def finish(axes: Axes, results: Results, keys: Mapping[str, Any]) -> None:
        for line in results.lines:
            if not (line.group.is_reference and keys.items() <= line.group.keys.items()):
                continue
            mean, sd = line.values[name]
            if math.isfinite(mean):
                axes.axhline(mean, color="black", linestyle=":", linewidth=1, alpha=0.5)
            if math.isfinite(sd):
                axes.axhspan(mean - sd, mean + sd, color="black", alpha=0.07, linewidth=0)

    return finish


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panels:
    """A grid of panels with a legend below.

    Attributes:
      file: The name of the file.
      caption: The text of the link in a README.
      by: The key that distinguishes lines, bars or points.
      across: Keys with a column of panels per combination of values.
      down: Keys with a row of panels per combination of values.
      style: The style per value of `by`.
      size: The width and height of a panel in inches.
      finish: Adds to a panel, such as a line at a target.
    """

    file: str
    caption: str
    by: str
    across: tuple[str, ...] = ()
    down: tuple[str, ...] = ()
    style: Style = plain_style
    size: tuple[float, float] = (3.4, 3.0)
    finish: Finish | None = None

    def grid(self, rows: Sequence[Row], repeats: int) -> tuple[Figure, np.ndarray, list]:
        """The figure, its panels, and the keys of the panels; every row has `repeats` of them."""
        require(rows, Path(self.file), "row")
        sides = [[*grouped(rows, names)] for names in (self.down, self.across)]
        shape = repeats * len(sides[0]), len(sides[1])
        size = 1 + self.size[0] * shape[1], 1 + self.size[1] * shape[0]
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(*shape, squeeze=False, sharey="row" if self.down else True)
        keys = [
            [
                dict(zip((*self.down, *self.across), (*down, *across), strict=True))
                for across in sides[1]
            ]
            for down in sides[0]
        ]
        return figure, panels, keys

    def names(self, rows: Sequence[Row]) -> list[str]:
        """The values of `by`, in the order of the rows."""
        return [*dict.fromkeys(row[self.by] for row in rows)]

    def complete(self, figure: Figure, panels: np.ndarray, keys: list, results: Results) -> None:
        """Adds titles, the grid, `finish` and the legend."""
        for axes, of_panel in zip(panels.flat, itertools.chain(*keys), strict=True):
            axes.set_visible(axes.has_data())  # Some combinations of keys have no row.
            axes.set_title(", ".join(map(str, of_panel.values())), size=10)
            axes.grid(which="both", alpha=0.2)
            set_plain_ticks(axes)
            if self.finish:
                self.finish(axes, results, of_panel)
        handles: dict[str, Any] = {}
        for axes in panels.flat:
            lines, labels = axes.get_legend_handles_labels()
            handles |= dict(zip(labels, lines, strict=True))
        inches = 0.7 + 0.09 * max(map(len, handles), default=0)  # Of the longest label.
        columns = max(1, min(5, int(figure.get_figwidth() / inches)))
        place: dict[str, Any] = {"loc": "outside lower center", "ncols": columns}
        if len(handles) > 20:
            figure.set_size_inches(figure.get_figwidth() + 4.6, figure.get_figheight())
            place = {"loc": "outside right center", "ncols": 2, "fontsize": 7}
        if len(handles) > 1:
            figure.legend([*handles.values()], [*handles], frameon=False, **place)
