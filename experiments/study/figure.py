"""Specifications of figures: lines with a band over seeds, bars, and points of a table."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from experiments.drawing import require, save, set_log_scale
from experiments.study.claims import Results
from experiments.study.statistics import confidence_interval, mean, sd
from experiments.study.tidy import Row, grouped, of_kind

COLORS = matplotlib.colormaps["tab10"].colors
MARKERS = "oDs^vPX*"
SAMPLES = 60
Band = Literal["sd", "range", "interval"]
Style = Callable[[int, str], Mapping[str, Any]]
"""`(number, name) -> options of matplotlib` of a line, a bar or a point."""


def plain_style(number: int, name: str) -> Mapping[str, Any]:
    """A color per name."""
    return {"color": COLORS[number % len(COLORS)]}


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
class _Panels:
    """A grid of panels with a legend below.

    Attributes:
      file: The name of the file.
      caption: The text of the link in a README.
      by: The key that distinguishes lines, bars or points.
      across: Keys with a column of panels per combination of values.
      down: Keys with a row of panels per combination of values.
      style: The style per value of `by`.
      size: The width and height of a panel in inches.
      finish: `(axes, results, keys of the panel)`; adds to a panel, such as a line at a target.
    """

    file: str
    caption: str
    by: str
    across: tuple[str, ...] = ()
    down: tuple[str, ...] = ()
    style: Style = plain_style
    size: tuple[float, float] = (3.4, 3.0)
    finish: Callable[[Axes, Results, Mapping[str, Any]], None] | None = None

    def _grid(self, rows: Sequence[Row], repeats: int) -> tuple[Figure, np.ndarray, list]:
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

    def _names(self, rows: Sequence[Row]) -> list[str]:
        return [*dict.fromkeys(row[self.by] for row in rows)]

    def _complete(self, figure: Figure, panels: np.ndarray, keys: list, results: Results) -> None:
        for axes, of_panel in zip(panels.flat, itertools.chain(*keys), strict=True):
            axes.set_title(", ".join(map(str, of_panel.values())), size=10)
            axes.grid(which="both", alpha=0.2)
            if self.finish:
                self.finish(axes, results, of_panel)
        handles: dict[str, Any] = {}
        for axes in panels.flat:
            handles |= {
                label: handle
                for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
                if label not in handles
            }
        if len(handles) > 1:
            figure.legend(
                [*handles.values()], [*handles], loc="outside lower center", ncols=5, frameon=False
            )


def _ends(values: Sequence[float], band: Band) -> tuple[float, float]:
    """The ends of a band; both are the mean if there is no spread."""
    center = mean(values)
    low, high = min(values), max(values)
    if band == "sd":
        low, high = center - sd(values), center + sd(values)
    elif band == "interval":
        low, high = confidence_interval(values)
    return (center, center) if math.isnan(low) or math.isnan(high) else (low, high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lines(_Panels):
    """Lines of `y` against `x` over the points of runs.

    Attributes:
      x: The columns on the horizontal axis; each has a row of panels.
      y: The column on the vertical axis.
      at: The column whose equal values are averaged over seeds. With None, runs have no common
        points: each is sampled at common values of `x`, by its last value of `y`.
      center: The average over seeds.
      band: The band over seeds.
      banded: Whether the line of a name has a band.
    """

    x: tuple[Axis, ...]
    y: Axis
    at: str | None = "step"
    center: Literal["mean", "median"] = "mean"
    band: Band = "interval"
    banded: Callable[[str], bool] = lambda name: True

    def _curve(self, rows: Sequence[Row], x: Axis) -> tuple[np.ndarray, list[list[float]]]:
        """The positions, and the values of all seeds at each."""
        if self.at:
            each = [*grouped(rows, [self.at]).values()]
            positions = [mean([row[x.name] for row in group]) for group in each]
            return np.array(positions), [[row[self.y.name] for row in group] for group in each]
        runs = [*grouped(rows, ["seed"]).values()]
        starts, ends = (max(run[0][x.name] for run in runs), min(run[-1][x.name] for run in runs))
        positions = np.geomspace(starts, ends, SAMPLES)
        sampled = [
            np.array([row[self.y.name] for row in run])[
                np.searchsorted([row[x.name] for row in run], positions, side="right") - 1
            ]
            for run in runs
        ]
        return positions, np.stack(sampled, axis=1).tolist()

    def _line(self, axes: Axes, rows: Sequence[Row], x: Axis, number: int, name: str) -> None:
        positions, values = self._curve(rows, x)
        style = dict(self.style(number, name))
        average = {"mean": np.mean, "median": np.median}[self.center]
        heights = np.array([average(each) for each in values])
        axes.plot(x.scale * positions, self.y.scale * heights, label=name, **style)
        if not self.banded(name):
            return
        low, high = (np.array(side) for side in zip(*(_ends(each, self.band) for each in values),
                                                   strict=True))  # fmt: skip
        if self.y.log:
            low = np.maximum(low, heights / 10)
        axes.fill_between(
            x.scale * positions,
            self.y.scale * low,
            self.y.scale * high,
            color=style.get("color"),
            alpha=0.15,
            linewidth=0,
        )

    def draw(self, folder: Path, results: Results) -> Path:
        """Draws the points of the rows; returns the path of the figure.

        Raises:
          ExperimentError: If there is no point, or the figure cannot be written.
        """
        rows = of_kind(results.rows, "point")
        figure, panels, keys = self._grid(rows, len(self.x))
        keys = [line for line in keys for _ in self.x]
        for (place, axes), x in zip(
            np.ndenumerate(panels),
            itertools.cycle(x for x in self.x for _ in range(panels.shape[1])),
            strict=False,
        ):
            of_panel = keys[place[0]][place[1]]
            for number, name in enumerate(self._names(rows)):
                wanted = {**of_panel, self.by: name}.items()
                if own := [row for row in rows if wanted <= row.items()]:
                    self._line(axes, own, x, number, name)
            axes.set_xlabel(x.label)
            set_log_scale(axes, x=x.log, y=False)
            if place[1] == 0:
                axes.set_ylabel(self.y.label)
        set_log_scale(*panels.flat, x=False, y=self.y.log)
        self._complete(figure, panels, keys, results)
        return save(figure, folder / self.file)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bars(_Panels):
    """A bar of a column of the runs per name, with its interval over seeds.

    Attributes:
      y: The column.
      band: What the black line at a bar shows.
    """

    y: Axis
    band: Band = "interval"

    def draw(self, folder: Path, results: Results) -> Path:
        """Draws the runs of the rows; returns the path. Runs that diverged have no bar.

        Raises:
          ExperimentError: If there is no finite run, or the figure cannot be written.
        """
        rows = [
            row for row in of_kind(results.rows, "run") if math.isfinite(row.get(self.y.name, 0))
        ]
        figure, panels, keys = self._grid(rows, 1)
        names = self._names(rows)
        for (place, axes), number in itertools.product(np.ndenumerate(panels), range(len(names))):
            wanted = {**keys[place[0]][place[1]], self.by: names[number]}.items()
            values = [self.y.scale * row[self.y.name] for row in rows if wanted <= row.items()]
            if not values:
                continue
            low, high = _ends(values, self.band)
            center = mean(values)
            axes.bar(number, center, label=names[number], **self.style(number, names[number]))
            axes.errorbar(number, center, yerr=[[max(0, center - low)], [max(0, high - center)]],
                          color="black", capsize=2, linewidth=1)  # fmt: skip
        for axes in panels.flat:
            axes.set_xticks([])
            if self.y.log:
                set_log_scale(axes, x=False)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        for axes in panels[:, 0]:
            axes.set_ylabel(self.y.label)
        self._complete(figure, panels, keys, results)
        return save(figure, folder / self.file)
