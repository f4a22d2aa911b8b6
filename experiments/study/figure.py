"""Specifications of figures: lines with a band over seeds, and points of a table."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

from experiments.study.claims import Results
from experiments.study.columns import Line
from experiments.study.drawing import save, set_log_scale
from experiments.study.groups import Estimate, Spread
from experiments.study.labels import Label, place_labels
from experiments.study.panels import Axis, Panels, plain_style
from experiments.study.statistics import confidence_interval, mean, sd
from experiments.study.tidy import Row, grouped, of_kind

SAMPLES = 60
Band = Literal["sd", "range", "interval"]


def ends(values: Sequence[float], band: Band) -> tuple[float, float]:
    """The ends of a band; both are the mean if there is no spread."""
    center = mean(values)
    low, high = min(values), max(values)
    if band == "sd":
        low, high = center - sd(values), center + sd(values)
    elif band == "interval":
        low, high = confidence_interval(values)
    return (center, center) if math.isnan(low) or math.isnan(high) else (low, high)


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
      only: The names that are drawn of a record that has all of them; of others, all are.
    """

    x: tuple[Axis, ...]
    y: Axis
    at: str | None = "step"
    center: Literal["mean", "median"] = "mean"
    band: Band = "interval"
    banded: Callable[[str], bool] = lambda name: True
    only: tuple[str, ...] = ()

    def names(self, rows: Sequence[Row]) -> list[str]:
        names = super().names(rows)
        chosen = [name for name in names if name in self.only]
        return chosen if len(chosen) == len(self.only) > 0 else names

    def curve(self, rows: Sequence[Row], x: Axis) -> tuple[np.ndarray, list[list[float]]]:
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
        positions, values = self.curve(rows, x)
        style = dict(self.style(number, name))
        average = {"mean": np.mean, "median": np.median}[self.center]
        heights = np.array([average(each) for each in values])
        axes.plot(x.scale * positions, self.y.scale * heights, label=name, **style)
        if not self.banded(name):
            return
        low, high = (np.array(side) for side in zip(*(ends(each, self.band) for each in values),
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
        needed = {self.y.name, *(x.name for x in self.x)}
        points = of_kind(results.rows, "point")
        # A study may have points of several kinds. Without the columns in any, the error names one.
        rows = [row for row in points if needed <= row.keys()] or points
        figure, panels, keys = self.grid(rows, len(self.x))
        keys = [line for line in keys for _ in self.x]
        for (place, axes), x in zip(
            np.ndenumerate(panels),
            itertools.cycle(x for x in self.x for _ in range(panels.shape[1])),
            strict=False,
        ):
            of_panel = keys[place[0]][place[1]]
            for number, name in enumerate(self.names(rows)):
                wanted = {**of_panel, self.by: name}.items()
                if own := [row for row in rows if wanted <= row.items()]:
                    self._line(axes, own, x, number, name)
            axes.set_xlabel(x.label)
            set_log_scale(axes, x=x.log, y=False)
            if place[1] == 0:
                axes.set_ylabel(self.y.label)
        set_log_scale(*panels.flat, x=False, y=self.y.log)
        self.complete(figure, panels, keys, results)
        return save(figure, folder / self.file)


def plain_mark(line: Line) -> Mapping[str, Any]:
    """A black circle."""
    return {"marker": "o", "color": "black"}


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
    mark: Callable[[Line], Mapping[str, Any]] = plain_mark
    joined: Callable[[Line], Any] | None = None
    numbered: bool = False
    size: tuple[float, float] = (7.0, 4.5)

    def position(self, line: Line) -> tuple[float, float, float, float]:
        """The position in units of the axes, and the lengths of the bar below and above."""
        y, below, above = line.values[self.y.name], math.nan, math.nan
        if isinstance(y, Spread):
            y, below, above = y.mean, y.sd, y.sd
        elif isinstance(y, Estimate):
            y, below, above = y.mean, y.mean - y.low, y.high - y.mean
        x, y = line.values[self.x.name], math.nan if y is None else y
        return self.x.scale * x, self.y.scale * y, self.y.scale * below, self.y.scale * above

    def _joined(self, lines: Sequence[Line]) -> list[list[Line]]:
        """The lines that are joined, from left to right; all others are in a group alone."""
        groups: dict[Any, list[Line]] = {}
        for line in sorted(lines, key=lambda line: self.position(line)[0]):
            groups.setdefault(self.joined(line) if self.joined else id(line), []).append(line)
        return [*groups.values()]

    def marks(self, lines: Sequence[Line]) -> dict[int, Mapping[str, Any]]:
        """The marker and the color by the `id` of a line."""
        colors = [plain_style(n, "") if self.joined else {} for n in range(len(lines))]
        return {
            id(line): {**self.mark(line), **color}
            for group, color in zip(self._joined(lines), colors, strict=False)
            for line in group
        }

    def _label(
        self, axes: Axes, lines: Sequence[Line], marks: Mapping[int, Any], texts: Mapping[str, str]
    ) -> None:
        """Labels the points, from top to bottom."""
        ordered = sorted(lines, key=lambda line: -self.position(line)[1])
        pixels = axes.transData.transform([self.position(line)[:2] for line in ordered])
        labels = [
            Label(
                texts[line.group.keys[self.by]],
                *self.position(line)[:2],
                marks[id(line)]["color"],
            )
            for line in ordered
        ]
        boxes = [Bbox.from_extents(x - 8, y - 8, x + 8, y + 8) for x, y in pixels]
        place_labels(axes, labels, boxes)

    def draw(self, folder: Path, results: Results) -> Path:
        """Draws the lines of the table; returns the path. Lines without finite values have none.

        Raises:
          ExperimentError: If there is no point, or the figure cannot be written.
        """
        lines = [line for line in results.lines if all(map(math.isfinite, self.position(line)[:2]))]
        marks = self.marks(lines)
        figure, panels, keys = self.grid([line.group.keys for line in lines], 1)
        texts = {name: name for name in self.names([line.group.keys for line in lines])}
        if self.numbered:
            texts = {name: str(number) for number, name in enumerate(texts, 1)}
        own = {
            place: [
                line
                for line in lines
                if keys[place[0]][place[1]].items() <= line.group.keys.items()
            ]
            for place, _ in np.ndenumerate(panels)
        }
        for place, axes in np.ndenumerate(panels):
            for line in own[place]:
                x, y, below, above = self.position(line)
                bar = None if math.isnan(below) else [[below], [above]]
                name = line.group.keys[self.by]
                label = {"label": f"{texts[name]} {name}"} if self.numbered else {}
                axes.errorbar(x, y, yerr=bar, capsize=2, elinewidth=0.7, linestyle="",
                              **label, **marks[id(line)])  # fmt: skip
            for group in self._joined(own[place]):
                x, y = zip(*(self.position(line)[:2] for line in group), strict=True)
                axes.plot(x, y, linestyle="--", linewidth=1, color=marks[id(group[0])]["color"])
            axes.set_xlabel(self.x.label)
            axes.margins(0.12)
            set_log_scale(axes, x=self.x.log, y=False)
        set_log_scale(*panels.flat, x=False, y=self.y.log)
        for axes in panels[:, 0]:
            axes.set_ylabel(self.y.label)
        self.complete(figure, panels, keys, results)
        figure.draw_without_rendering()
        for place, axes in np.ndenumerate(panels):
            if own[place]:
                self._label(axes, own[place], marks, texts)
        return save(figure, folder / self.file)
