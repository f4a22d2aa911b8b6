"""The figures of a study as specifications of Vega-Lite, from the axes that the study declares."""

import functools
from typing import Any

from experiments.report import forest, lines, points
from experiments.report.chart import Chart
from experiments.study.claims import Results
from experiments.study.figure import Lines, Points
from experiments.study.forest import Forest


@functools.singledispatch
def charts(figure: Any, results: Results) -> list[Chart]:
    """The charts of a figure, one per horizontal axis.

    Raises:
      NotImplementedError: If no function here knows the kind of figure.
    """
    raise NotImplementedError(f"No chart of a {type(figure).__name__}: register one.")


charts.register(Lines, lines.charts)
charts.register(Points, points.charts)
charts.register(Forest, forest.charts)
