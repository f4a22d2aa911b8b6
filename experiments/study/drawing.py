"""Helpers that draw and write figures."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.cli.errors import ExperimentError
from experiments.study.files import write_atomically

DPI = 150


def require(rows: Sequence[Any], folder: Path, what: str) -> Sequence[Any]:
    """Returns the rows if there are any. The record of an interrupted run may have none.

    Raises:
      ExperimentError: If there are no rows.
    """
    if not rows:
        raise ExperimentError(f"{folder} has no {what} to draw.")
    return rows


def set_log_scale(*all_axes: Axes, x: bool = True, y: bool = True) -> None:
    """Sets logarithmic scales of panels that share the y axis, if there are positive values.

    A record may have none: one device sends 0 bytes, and a run may diverge at once.
    """
    for axes in all_axes:
        if x and math.isfinite(axes.dataLim.minposx):
            axes.set_xscale("log")
        if y and any(math.isfinite(other.dataLim.minposy) for other in all_axes):
            axes.set_yscale("log")


def save(figure: Figure, path: Path) -> Path:
    """Writes a figure atomically and returns its path.

    Raises:
      ExperimentError: If the figure cannot be written.
    """
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DPI, format="png")
    write_atomically(path, drawn.getvalue())
    return path
