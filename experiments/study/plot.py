"""Figures: lines with a band over seeds, and labeled points of a table, in panels by keys."""

import dataclasses
import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from adjustText import adjust_text
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter
from PIL import Image

from experiments.errors import ExperimentError
from experiments.study.claims import Results
from experiments.study.record import Row, grouped, of_kind, write_atomically
from experiments.study.statistics import mean, t_interval
from experiments.study.table import Estimate, Line, Spread

COLORS = matplotlib.colormaps["tab10"].colors
SAMPLES = 60
Style = Callable[[int, str], Mapping[str, Any]]
"""`(number, name) -> options of matplotlib` of a line or a point."""

Finish = Callable[[Axes, Results, Mapping[str, Any]], None]
"""`(axes, results, keys of the panel)`; adds to a panel."""

Fill = Callable[[Axes, "Axis", list[Any]], list[Text] | None]
"""`(axes, x, parts) -> texts` that are moved apart; draws the parts of a panel."""


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


def add_legend(figure: Figure, handles: Mapping[str, Any]) -> None:
    """Adds a legend below the panels, or beside them if it is long."""
    inches = 0.7 + 0.09 * max(map(len, handles))  # Of the longest label.
    columns = max(1, min(5, int(figure.get_figwidth() / inches)))
    place: dict[str, Any] = {"loc": "outside lower center", "ncols": columns}
    if len(handles) > 20:
        figure.set_size_inches(figure.get_figwidth() + 4.6, figure.get_figheight())
        place = {"loc": "outside right center", "ncols": 2, "fontsize": 7}
    figure.legend([*handles.values()], [*handles], frameon=False, **place)


class Axis(NamedTuple):
    """A column, the text at its axis, and the factor of its values, such as 1e-6 for MB.

    With `log` the axis is logarithmic, if it has values above 0.
    """

    name: str
    label: str
    scale: float = 1.0
    log: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panels:
    """A grid of panels with a legend.

    Attributes:
      caption: The text of the link to the file in a README.
      by: The key that distinguishes lines or points.
      x: The columns on the horizontal axis; each has a row of panels.
      y: The column on the vertical axis, which panels share.
      across: Keys with a column of panels per combination of values.
      down: Keys with a row of panels per combination of values.
      size: The width and height of a panel in inches.
      finish: Adds to a panel, such as a line at a target.
    """

    file: str
    caption: str
    by: str
    x: tuple[Axis, ...]
    y: Axis
    across: tuple[str, ...] = ()
    down: tuple[str, ...] = ()
    size: tuple[float, float] = (3.4, 3.0)
    finish: Finish | None = None

    def _draw(
        self, folder: Path, results: Results, parts: Sequence[tuple[Row, Any]], fill: Fill
    ) -> Path:
        """Draws each of the parts in the panel of its keys; returns the path of the figure."""
        if not parts:  # As in an interrupted record.
            raise ExperimentError(f"There is nothing to draw in {self.file}.")
        of_parts = [keys for keys, _ in parts]
        down, across = ([*grouped(of_parts, names)] for names in (self.down, self.across))
        shape = len(self.x) * len(down), len(across)
        size = 1 + self.size[0] * shape[1], 1 + self.size[1] * shape[0]
        figure, filled = Figure(size, layout="constrained"), []
        panels = figure.subplots(*shape, squeeze=False, sharey="row" if self.down else True)
        for (row, column), axes in np.ndenumerate(panels):
            x, values = self.x[row % len(self.x)], (*down[row // len(self.x)], *across[column])
            keys = dict(zip((*self.down, *self.across), values, strict=True))
            own = [part for of_part, part in parts if keys.items() <= of_part.items()]
            filled.append((axes, keys, fill(axes, x, own)))
            axes.set_xlabel(x.label)
            axes.set_ylabel("" if column else self.y.label)
        self._set_scales(panels)
        handles: dict[str, Any] = {}
        for axes, keys, _ in filled:
            axes.set_visible(axes.has_data())  # Some combinations of keys have no row.
            axes.set_title(", ".join(map(str, keys.values())), size=10)
            axes.grid(which="both", alpha=0.2)
            if self.finish:
                self.finish(axes, results, keys)
            lines, labels = axes.get_legend_handles_labels()
            handles |= dict(zip(labels, lines, strict=True))
        if len(handles) > 1:
            add_legend(figure, handles)
        if moved := [(axes, texts) for axes, _, texts in filled if texts]:
            figure.draw_without_rendering()
        for axes, texts in moved:
            adjust_text(texts, ax=axes, arrowprops={"arrowstyle": "-", "lw": 0.5})
        return save(figure, folder / self.file)

    def _set_scales(self, panels: np.ndarray) -> None:
        """Logarithmic axes with plain numbers, fewer the more they span."""
        for (row, _), axes in np.ndenumerate(panels):
            if self.x[row % len(self.x)].log and math.isfinite(axes.dataLim.minposx):
                axes.set_xscale("log")
            if self.y.log and any(math.isfinite(each.dataLim.minposy) for each in panels.flat):
                axes.set_yscale("log")
            for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
                if axis.get_scale() == "log":
                    shown = "23456789" if high < 5 * low else "25" if high < 1000 * low else ""
                    minor = lambda x, _, s=shown: f"{x:g}" if f"{x:e}"[0] in s else ""  # noqa: E731
                    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
                    axis.set_minor_formatter(FuncFormatter(minor))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lines(Panels):
    """Lines of `y` against `x` over the points of runs.

    Attributes:
      style: The style per value of `by`.
      at: The column whose equal values are averaged over seeds. With None, runs have no common
        points: each is sampled at common values of `x`, by its last value of `y`.
      center: The average over seeds.
      band: The ends of the band over seeds.
      banded: Whether the line of a name has a band.
      only: The names that are drawn of a record that has all of them, each with the text at the
        end of its line; of other records, all are, with a legend.
    """

    style: Style = plain_style
    at: str | None = "step"
    center: Callable[[Sequence[float]], Any] = np.mean
    band: Callable[[Sequence[float]], tuple[float, float]] = t_interval
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
        low, high = self.band(values)
        if math.isnan(low) or math.isnan(high):
            return center, center
        return max(low, center / 10) if self.y.log else low, high

    def draw(self, folder: Path, results: Results) -> Path:
        """Draws the points of the rows; returns the path of the figure."""
        needed = {self.y.name, *(x.name for x in self.x)}
        points = [row for row in of_kind(results.rows, "point") if needed <= row.keys()]
        names = [*dict.fromkeys(row[self.by] for row in points)]
        texts = self.only if {*self.only} <= {*names} else {}

        def fill(axes: Axes, x: Axis, points: Sequence[Row]) -> None:
            for number, name in enumerate(texts or names):
                if not (rows := [row for row in points if row[self.by] == name]):
                    continue
                positions, values = self.curve(rows, x)
                centers = [self.center(each) for each in values]
                at, heights = x.scale * positions, self.y.scale * np.array(centers)
                style = {"label": "" if texts else name, **self.style(number, name)}
                (line,) = axes.plot(at, heights, **style)
                if texts:
                    end, place = (max(at), heights[np.argmax(at)]), "offset points"
                    axes.annotate(texts[name], end, (20, 0), textcoords=place, va="center", size=10)
                if self.banded(name):
                    ends = [self._ends(*each) for each in zip(values, centers, strict=True)]
                    low, high = self.y.scale * np.array(ends).T
                    axes.fill_between(at, low, high, alpha=0.15, lw=0, color=line.get_color())

        return self._draw(folder, results, [(row, row) for row in points], fill)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Points(Panels):
    """A labeled point per line of the table, if it has finite values.

    A spread has a bar of a standard deviation, and an estimate a bar of its interval.

    Attributes:
      mark: The marker and the color of a line; its group by `joined` has a color by default.
      joined: The points of lines with equal values of this function are joined.
      numbered: Whether points have numbers, which the legend explains, instead of names.
    """

    mark: Callable[[Line], Mapping[str, Any]] = lambda line: {"marker": "o", "color": "black"}
    joined: Callable[[Line], Any] = id
    numbered: bool = False
    size: tuple[float, float] = (7.0, 4.5)

    def position(self, line: Line) -> tuple[float, ...]:
        """The position in units of the axes, and the lengths of the bar below and above."""
        (x,), y, below, above = self.x, line[self.y.name], math.nan, math.nan
        if isinstance(y, Spread):
            y, below, above = y.mean, y.sd, y.sd
        elif isinstance(y, Estimate):
            y, below, above = y.mean, y.mean - y.low, y.high - y.mean
        y = math.nan if y is None else y
        return (x.scale * line[x.name], *(self.y.scale * each for each in (y, below, above)))

    def draw(self, folder: Path, results: Results) -> Path:
        """Draws the lines of the table; returns the path of the figure."""
        points = [(line, *self.position(line)) for line in results.lines]
        parts = [
            (each[0].group.keys, each) for each in points if all(map(math.isfinite, each[1:3]))
        ]
        names = [*dict.fromkeys(keys[self.by] for keys, _ in parts)]

        def fill(axes: Axes, _: Axis, points: Sequence[Any]) -> list[Text]:
            texts, groups = [], {}
            for point in points:
                groups.setdefault(self.joined(point[0]), []).append(point)
            for number, group in enumerate(groups.values()):
                group.sort(key=lambda point: point[1])
                for line, x, y, *bar in group:
                    name = line.group.keys[self.by]
                    text = str(1 + names.index(name)) if self.numbered else name
                    label = {"label": f"{text} {name}"} if self.numbered else {}
                    mark = {**plain_style(number, ""), **self.mark(line), **label}
                    bars = None if math.isnan(bar[0]) else [[each] for each in bar]
                    axes.errorbar(x, y, bars, capsize=2, elinewidth=0.7, linestyle="", **mark)
                    texts.append(axes.text(x, y, text, size=8, color=mark["color"]))
                _, x, y, *_ = zip(*group, strict=True)
                axes.plot(x, y, linestyle="--", linewidth=1, color=mark["color"])
            axes.margins(0.12)
            return texts

        return self._draw(folder, results, parts, fill)
