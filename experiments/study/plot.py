"""Figures: lines with a band over seeds, and labeled points of a table, in panels by keys."""

import dataclasses
import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from adjustText import adjust_text
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from PIL import Image

from experiments.errors import ExperimentError
from experiments.study.claims import Results
from experiments.study.record import Row, grouped, of_kind, write_atomically
from experiments.study.statistics import confidence_interval, mean
from experiments.study.table import Estimate, Line, Spread

COLORS = matplotlib.colormaps["tab10"].colors
SAMPLES = 60
Style = Callable[[int, str], Mapping[str, Any]]
"""`(number, name) -> options of matplotlib` of a line or a point."""

Finish = Callable[[Axes, Results, Mapping[str, Any]], None]
"""`(axes, results, keys of the panel)`; adds to a panel."""


def save(figure: Figure, path: Path) -> Path:
    """Writes a figure in 64 colors, which take a third of the bytes, and returns its path."""
    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, dpi=150, format="png")
    Image.open(drawn).convert("RGB").quantize(64).save(small, "PNG", optimize=True)
    write_atomically(path, small.getvalue())
    return path


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


def set_scales(panels: np.ndarray, x: Sequence[bool], y: bool) -> None:
    """Logarithmic axes with plain numbers, if they have positive values; fewer the more they span.

    Args:
      panels: The panels, which share y axes.
      x: Whether the x axis is logarithmic, by row of panels.
      y: Whether the y axes are.
    """
    for (row, _), axes in np.ndenumerate(panels):
        if x[row] and math.isfinite(axes.dataLim.minposx):
            axes.set_xscale("log")
        if y and any(math.isfinite(each.dataLim.minposy) for each in panels.flat):
            axes.set_yscale("log")
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            if axis.get_scale() == "log":
                shown = "23456789" if high < 5 * low else "25" if high < 1000 * low else ""
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                axis.set_minor_formatter(
                    FuncFormatter(lambda v, _, s=shown: f"{v:g}" if f"{v:e}"[0] in s else "")
                )


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panels:
    """A grid of panels with a legend below.

    Attributes:
      file: The name of the file.
      caption: The text of the link in a README.
      by: The key that distinguishes lines or points.
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

    def grid(self, rows: Sequence[Row], repeats: int = 1) -> tuple[Figure, np.ndarray, np.ndarray]:
        """The figure, its panels, and their keys; there are `repeats` rows of each kind.

        Raises:
          ExperimentError: If there is nothing to draw, as in an interrupted record.
        """
        if not rows:
            raise ExperimentError(f"There is nothing to draw in {self.file}.")
        down, across = ([*grouped(rows, names)] for names in (self.down, self.across))
        shape = repeats * len(down), len(across)
        figure = Figure((1 + self.size[0] * shape[1], 1 + self.size[1] * shape[0]),
                        layout="constrained")  # fmt: skip
        panels = figure.subplots(*shape, squeeze=False, sharey="row" if self.down else True)
        keys = np.empty(shape, object)
        for row, column in np.ndindex(*shape):
            values = (*down[row // repeats], *across[column])
            keys[row, column] = dict(zip((*self.down, *self.across), values, strict=True))
        return figure, panels, keys

    def complete(
        self, figure: Figure, panels: np.ndarray, keys: np.ndarray, results: Results,
        legend: bool = True,
    ) -> None:  # fmt: skip
        """Adds titles, the grid, `finish` and the legend, if there is one."""
        handles: dict[str, Any] = {}
        for axes, of_panel in zip(panels.flat, keys.flat, strict=True):
            axes.set_visible(axes.has_data())  # Some combinations of keys have no row.
            axes.set_title(", ".join(map(str, of_panel.values())), size=10)
            axes.grid(which="both", alpha=0.2)
            if self.finish:
                self.finish(axes, results, of_panel)
            lines, labels = axes.get_legend_handles_labels()
            handles |= dict(zip(labels, lines, strict=True))
        inches = 0.7 + 0.09 * max(map(len, handles), default=0)  # Of the longest label.
        columns = max(1, min(5, int(figure.get_figwidth() / inches)))
        place: dict[str, Any] = {"loc": "outside lower center", "ncols": columns}
        if len(handles) > 20:
            figure.set_size_inches(figure.get_figwidth() + 4.6, figure.get_figheight())
            place = {"loc": "outside right center", "ncols": 2, "fontsize": 7}
        if legend and len(handles) > 1:
            figure.legend([*handles.values()], [*handles], frameon=False, **place)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lines(Panels):
    """Lines of `y` against `x` over the points of runs.

    Attributes:
      x: The columns on the horizontal axis; each has a row of panels.
      y: The column on the vertical axis.
      at: The column whose equal values are averaged over seeds. With None, runs have no common
        points: each is sampled at common values of `x`, by its last value of `y`.
      center: The average over seeds.
      band: The band over seeds.
      banded: Whether the line of a name has a band.
      only: The names that are drawn of a record that has all of them, each with the text at the
        end of its line; of other records, all are, with a legend.
    """

    x: tuple[Axis, ...]
    y: Axis
    at: str | None = "step"
    center: Literal["mean", "median"] = "mean"
    band: Literal["range", "interval"] = "interval"
    banded: Callable[[str], bool] = lambda name: True
    only: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def curve(self, rows: Sequence[Row], x: Axis) -> tuple[np.ndarray, list[list[float]]]:
        """The positions, and the values of all seeds at each."""
        if self.at:
            each = [*grouped(rows, [self.at]).values()]
            positions = [mean([row[x.name] for row in group]) for group in each]
            return np.array(positions), [[row[self.y.name] for row in group] for group in each]
        runs = [*grouped(rows, ["seed"]).values()]
        starts, ends = max(run[0][x.name] for run in runs), min(run[-1][x.name] for run in runs)
        positions = np.geomspace(starts, ends, SAMPLES)
        sampled = []
        for run in runs:
            places = np.searchsorted([row[x.name] for row in run], positions, side="right") - 1
            sampled.append(np.array([row[self.y.name] for row in run])[places])
        return positions, np.stack(sampled, axis=1).tolist()

    def _ends(self, values: Sequence[float], center: float) -> tuple[float, float]:
        """The ends of the band, within the axis; both are the center if there is no spread."""
        low, high = min(values), max(values)
        if self.band == "interval":
            low, high = confidence_interval(values)
        if math.isnan(low) or math.isnan(high):
            return center, center
        return max(low, center / 10) if self.y.log else low, high

    def _line(self, axes: Axes, rows: Sequence[Row], x: Axis, number: int, name: str,
              text: str = "") -> None:  # fmt: skip
        positions, values = self.curve(rows, x)
        style = self.style(number, name)
        heights = np.array([getattr(np, self.center)(each) for each in values])
        axes.plot(x.scale * positions, self.y.scale * heights, label=name, **style)
        if text:
            last = np.argmax(positions)
            end = x.scale * positions[last], self.y.scale * heights[last]
            axes.annotate(text, end, (20, 0), textcoords="offset points", va="center", size=10)
        if self.banded(name):
            ends = np.array([self._ends(*each) for each in zip(values, heights, strict=True)]).T
            axes.fill_between(x.scale * positions, *(self.y.scale * ends), alpha=0.15, linewidth=0,
                              color=style.get("color"))  # fmt: skip

    def draw(self, folder: Path, results: Results) -> Path:
        """Draws the points of the rows; returns the path of the figure."""
        needed = {self.y.name, *(x.name for x in self.x)}
        rows = [row for row in of_kind(results.rows, "point") if needed <= row.keys()]
        names = [*dict.fromkeys(row[self.by] for row in rows)]
        texts = self.only if {*self.only} <= {*names} else {}
        names = [*texts] or names
        figure, panels, keys = self.grid(rows, len(self.x))
        for (place, axes), x in zip(
            np.ndenumerate(panels),
            itertools.cycle(x for x in self.x for _ in range(panels.shape[1])),
            strict=False,
        ):
            for number, name in enumerate(names):
                wanted = {**keys[place], self.by: name}.items()
                if own := [row for row in rows if wanted <= row.items()]:
                    self._line(axes, own, x, number, name, texts.get(name, ""))
            axes.set_xlabel(x.label)
            if place[1] == 0:
                axes.set_ylabel(self.y.label)
        set_scales(panels, [x.log for x in self.x] * panels.shape[0], self.y.log)
        self.complete(figure, panels, keys, results, legend=not texts)
        return save(figure, folder / self.file)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Points(Panels):
    """A labeled point per line of the table.

    Attributes:
      x: The column of the table on the horizontal axis.
      y: The column on the vertical axis; a spread has a bar of a standard deviation, and an
        estimate a bar of its interval.
      mark: The marker and the color of a line.
      joined: Lines with equal values of this function share a color, and their points are joined.
      numbered: Whether points have numbers, which the legend explains, instead of names.
    """

    x: Axis
    y: Axis
    mark: Callable[[Line], Mapping[str, Any]] = lambda line: {"marker": "o", "color": "black"}
    joined: Callable[[Line], Any] | None = None
    numbered: bool = False
    size: tuple[float, float] = (7.0, 4.5)

    def position(self, line: Line) -> tuple[float, float, float, float]:
        """The position in units of the axes, and the lengths of the bar below and above."""
        y, below, above = line[self.y.name], math.nan, math.nan
        if isinstance(y, Spread):
            y, below, above = y.mean, y.sd, y.sd
        elif isinstance(y, Estimate):
            y, below, above = y.mean, y.mean - y.low, y.high - y.mean
        y = math.nan if y is None else y
        return (self.x.scale * line[self.x.name], *(self.y.scale * n for n in (y, below, above)))

    def draw(self, folder: Path, results: Results) -> Path:
        """Draws the lines of the table; returns the path. Lines without finite values have none."""
        lines = [line for line in results.lines if all(map(math.isfinite, self.position(line)[:2]))]
        figure, panels, keys = self.grid([line.group.keys for line in lines])
        texts = {name: name for name in (line.group.keys[self.by] for line in lines)}
        if self.numbered:
            texts = {name: str(number) for number, name in enumerate(texts, 1)}
        drawn = {}
        for place, axes in np.ndenumerate(panels):
            own = [line for line in lines if keys[place].items() <= line.group.keys.items()]
            groups: dict[Any, list[Line]] = {}
            for line in own:
                groups.setdefault(self.joined(line) if self.joined else id(line), []).append(line)
            drawn[place] = []
            for number, group in enumerate(groups.values()):
                group.sort(key=lambda line: self.position(line)[0])
                color = plain_style(number, "") if self.joined else {}
                for line in group:
                    x, y, below, above = self.position(line)
                    bar = None if math.isnan(below) else [[below], [above]]
                    mark, name = {**self.mark(line), **color}, line.group.keys[self.by]
                    if self.numbered:
                        mark["label"] = f"{texts[name]} {name}"
                    axes.errorbar(x, y, yerr=bar, capsize=2, elinewidth=0.7, linestyle="", **mark)
                    drawn[place].append(axes.text(x, y, texts[name], size=8, color=mark["color"]))
                x, y = zip(*(self.position(line)[:2] for line in group), strict=True)
                axes.plot(x, y, linestyle="--", linewidth=1, color=mark["color"])
            axes.set_xlabel(self.x.label)
            axes.margins(0.12)
        set_scales(panels, [self.x.log] * panels.shape[0], self.y.log)
        for axes in panels[:, 0]:
            axes.set_ylabel(self.y.label)
        self.complete(figure, panels, keys, results)
        figure.draw_without_rendering()
        for place, axes in np.ndenumerate(panels):
            if drawn[place]:
                adjust_text(drawn[place], ax=axes, arrowprops={"arrowstyle": "-", "lw": 0.5})
        return save(figure, folder / self.file)
