"""What the charts of all kinds of figures share: data, positions, panels and texts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.study.panels import Axis, Panels

DASHES = {"-": [1, 0], "--": [6, 4], "-.": [6, 3, 1, 3], ":": [2, 3]}
X = "M-1,-.5L-.5,-1L0,-.5L.5,-1L1,-.5L.5,0L1,.5L.5,1L0,.5L-.5,1L-1,.5L-.5,0Z"
SHAPES = {
    "o": "circle", "s": "square", "D": "diamond", "^": "triangle-up", "v": "triangle-down",
    "P": "cross", "X": X,
    ">": "triangle-right", "<": "triangle-left",
}  # fmt: skip
Datum = dict[str, Any]


class Chart(NamedTuple):
    """A figure.

    Attributes:
      caption: What it shows.
      spec: The specification, without data.
      rows: The data.
      description: What a screen reader says of it: the axes and the names.
      note: What the labels in the figure mean; empty if they need no explanation.
    """

    caption: str
    spec: dict[str, Any]
    rows: list[Datum]
    description: str
    note: str = ""


def number(value: Any, log: bool = False) -> float | None:
    """A number of 6 digits; None if an axis cannot show it."""
    if value is None or not math.isfinite(value) or (log and value <= 0):
        return None
    return float(f"{value:.6g}")


def cell(figure: Panels, keys: Mapping[str, Any]) -> Datum:
    """The panel of some keys: its name, and those of its row and of its column."""
    sides = {"panel": (*figure.down, *figure.across), "down": figure.down, "across": figure.across}
    return {
        side: ", ".join(str(keys[name]) for name in names) for side, names in sides.items()
    }  # fmt: skip


def listed(names: Sequence[str], most: int = 12) -> str:
    """Names in a sentence; only how many there are if they are too many to listen to."""
    return ", ".join(names) if len(names) <= most else f"{len(names)} names"


def encoded(field: str, axis: Axis, rows: Iterable[Datum], **more: Any) -> dict[str, Any]:
    """A position on an axis, which is logarithmic if the study says so and values are above 0."""
    log = axis.log and any((row.get(field) or 0) > 0 for row in rows)
    scale = {"type": "log"} if log else {"type": "linear", "zero": False}
    return {"field": field, "type": "quantitative", "title": axis.label, "scale": scale, **more}


def in_panels(spec: dict[str, Any], rows: Sequence[Datum], *, shared: bool) -> dict[str, Any]:
    """The specification, once per panel if panels have names: a grid of rows and columns."""
    facet = {}
    for side, field in (("row", "down"), ("column", "across")):
        names = [*dict.fromkeys(row[field] for row in rows)]
        if any(names):
            facet[side] = {"field": field, "type": "nominal", "title": None, "sort": names,
                           "header": {"labelExpr": r"split(datum.label, '\n')"}}  # fmt: skip
    if not facet:
        return spec
    own = {"x": "independent", **({} if shared else {"y": "independent"})}
    return {"facet": facet, "spec": spec, "resolve": {"scale": own}}


def hover(*fields: tuple[str, str]) -> list[dict[str, str]]:
    """What a pointer shows: `(field, its name)`."""
    return [{"field": field, "title": name} for field, name in fields]


def where(*fields: str) -> list[dict[str, str]]:
    """Only rows in which all fields have a value."""
    return [{"filter": " && ".join(f"isValid(datum.{field})" for field in fields)}]
