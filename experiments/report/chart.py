"""What the charts of all kinds of figures share: data, positions, panels and texts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.study.panels import Axis

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
      note: What the labels in the figure mean; empty if they need no explanation.
    """

    caption: str
    spec: dict[str, Any]
    rows: list[Datum]
    note: str = ""


def number(value: Any, log: bool = False) -> float | None:
    """A number of 6 digits; None if an axis cannot show it."""
    if value is None or not math.isfinite(value) or (log and value <= 0):
        return None
    return float(f"{value:.6g}")


def title(keys: Mapping[str, Any]) -> str:
    """The name of a panel: the values of its keys."""
    return ", ".join(map(str, keys.values()))


def encoded(field: str, axis: Axis, rows: Iterable[Datum], **more: Any) -> dict[str, Any]:
    """A position on an axis, which is logarithmic if the study says so and values are above 0."""
    log = axis.log and any((row.get(field) or 0) > 0 for row in rows)
    scale = {"type": "log"} if log else {"type": "linear", "zero": False}
    return {"field": field, "type": "quantitative", "title": axis.label, "scale": scale, **more}


def in_panels(spec: dict[str, Any], rows: Sequence[Datum], *, shared: bool) -> dict[str, Any]:
    """The specification, once per panel if there is a panel with a title."""
    names = [*dict.fromkeys(row["panel"] for row in rows)]
    if names in ([], [""]):
        return spec
    own = {"x": "independent", **({} if shared else {"y": "independent"})}
    facet = {"field": "panel", "type": "nominal", "title": None, "sort": names}
    return {"facet": facet, "spec": spec, "resolve": {"scale": own}}


def hover(*fields: tuple[str, str]) -> list[dict[str, str]]:
    """What a pointer shows: `(field, its name)`."""
    return [{"field": field, "title": name} for field, name in fields]


def where(*fields: str) -> list[dict[str, str]]:
    """Only rows in which all fields have a value."""
    return [{"filter": " && ".join(f"isValid(datum.{field})" for field in fields)}]
