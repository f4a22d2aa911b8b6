"""A figure of the lines of a table: estimates with intervals, one row per value of a key."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.study.claims import Results
from experiments.study.columns import Line
from experiments.study.drawing import require, save

Values = Callable[[Line], tuple[float, float, float, str] | None]
"""`line -> (center, low, high, outcome)`, or None if the line has no point in a panel."""


@dataclasses.dataclass(frozen=True)
class Panel:
    """A column of the figure.

    Attributes:
      title: The text above.
      label: The text below.
      values: The points.
      note: `line -> text` at the right of its row; the first text of a row counts.
    """

    title: str
    label: str
    values: Values
    note: Callable[[Line], str] = lambda line: ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forest:
    """Rows of points with intervals around a line at 0, in several panels.

    Attributes:
      file: The name of the file.
      caption: The text of the link in a README.
      by: The key with a row per value.
      within: The key of the points of a row, which have a marker each.
      group: `line -> name` of the group of rows, which is written at their left.
      panels: The panels.
      colors: The color per outcome, in the order of the legend.
      margin: Half of the width of the band around 0.
      limit: The largest magnitude that is shown; points beyond it are arrows at the edge.
    """

    file: str
    caption: str
    by: str
    within: str
    group: Callable[[Line], str]
    panels: Sequence[Panel]
    colors: Mapping[str, Any]
    margin: float
    limit: float

    def _point(self, axes: Axes, values: tuple[float, float, float, str], y: float, m: str) -> None:
        center, low, high, outcome = values
        style: dict[str, Any] = {"color": self.colors[outcome], "zorder": 3}
        shown = min(max(center, -self.limit), self.limit)
        if shown != center:
            m = ">" if center > 0 else "<"
        if math.isfinite(low) and math.isfinite(high):
            axes.plot([max(low, -self.limit), min(high, self.limit)], [y, y], lw=1.3, **style)
        axes.plot(shown, y, linestyle="", marker=m, markersize=5.5, **style)

    def draw(self, folder: Path, results: Results) -> Path:
        """Draws the lines of the table; returns the path of the figure.

        Raises:
          ExperimentError: If there is no line, or the figure cannot be written.
        """
        lines = require(results.lines, folder / self.file, "line")
        names = [*dict.fromkeys(line.group.keys[self.by] for line in lines)]
        kinds = [*dict.fromkeys(line.group.keys[self.within] for line in lines)]
        groups = {name: self.group(next(line for line in lines
                                        if line.group.keys[self.by] == name))
                  for name in names}  # fmt: skip
        names.sort(key=lambda name: [*dict.fromkeys(groups.values())].index(groups[name]))
        places, place = {}, 0.0
        for number, name in enumerate(names):
            place += 1.7 if number and groups[name] != groups[names[number - 1]] else 1.0
            places[name] = place
        markers = dict(zip(kinds, "osD^v"[: len(kinds)], strict=False))
        figure = Figure(figsize=(3.2 + 3.0 * len(self.panels), 2.2 + 0.3 * place),
                        layout="constrained")  # fmt: skip
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, len(self.panels), sharey=True, squeeze=False)[0]
        for panel, axes in zip(self.panels, panels, strict=True):
            axes.axvspan(-self.margin, self.margin, color="black", alpha=0.07, linewidth=0)
            axes.axvline(0, color="black", linewidth=1)
            notes: dict[str, str] = {}
            for line in lines:
                name, kind = line.group.keys[self.by], line.group.keys[self.within]
                notes[name] = notes.get(name) or panel.note(line)
                offset = 0.22 * (kinds.index(kind) - (len(kinds) - 1) / 2)
                if (values := panel.values(line)) is not None:
                    self._point(axes, values, places[name] + offset, markers[kind])
            for name, note in notes.items():
                axes.text(1.02, places[name], note, transform=axes.get_yaxis_transform(),
                          va="center", size=8)  # fmt: skip
            axes.set_xlim(-1.06 * self.limit, 1.06 * self.limit)
            axes.set_title(panel.title, size=10)
            axes.set_xlabel(panel.label, size=9)
            axes.grid(axis="x", alpha=0.3)
            axes.tick_params(axis="y", length=0)
        panels[0].set_yticks([*places.values()], [*places], size=9)
        panels[0].set_ylim(place + 0.8, 0.0)
        for group in dict.fromkeys(groups.values()):
            own = [places[name] for name in names if groups[name] == group]
            for axes in panels:
                axes.axhline(min(own) - 0.85, color="black", linewidth=0.4, alpha=0.5)
            panels[0].text(0.02, min(own) - 0.62, group, size=8, style="italic", va="center",
                           transform=panels[0].get_yaxis_transform(), alpha=0.75)  # fmt: skip
        handles = [Line2D([], [], color="black", marker=m, linestyle="", label=kind)
                   for kind, m in markers.items()]  # fmt: skip
        handles += [Line2D([], [], color=color, linewidth=3, label=outcome)
                    for outcome, color in self.colors.items()]  # fmt: skip
        figure.legend(handles=handles, loc="outside lower center", frameon=False,
                      ncols=len(handles), fontsize=9)  # fmt: skip
        return save(figure, folder / self.file)
