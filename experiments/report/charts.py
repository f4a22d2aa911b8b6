"""The figures of a study as specifications of Vega-Lite, from the axes that the study declares."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from experiments.study.claims import Results
from experiments.study.figure import Lines, Points, ends
from experiments.study.forest import Forest
from experiments.study.panels import Axis, Panels
from experiments.study.statistics import mean
from experiments.study.tidy import of_kind

DASHES = {"-": [1, 0], "--": [6, 4], "-.": [6, 3, 1, 3], ":": [2, 3]}
SHAPES = {"o": "circle", "s": "square", "D": "diamond", "^": "triangle-up", "v": "triangle-down"}
Datum = dict[str, Any]


class Chart(NamedTuple):
    """A figure.

    Attributes:
      caption: What it shows.
      spec: The specification, without data.
      rows: The data.
    """

    caption: str
    spec: dict[str, Any]
    rows: list[Datum]


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


def marks_of(figure: Panels, results: Results, keys: Mapping[str, Any]) -> list[Datum]:
    """Horizontal lines that `finish` adds to a panel, such as a target."""
    if figure.finish is None:
        return []
    axes = Figure().subplots()
    figure.finish(axes, results, keys)
    lines = [line.get_ydata() for line in axes.lines if "y0" not in line.get_label()]
    return [{"panel": title(keys), "rule": number(y[0])} for y in lines
            if len(y) == 2 and y[0] == y[1] and number(y[0]) is not None]  # fmt: skip


def in_panels(spec: dict[str, Any], rows: Sequence[Datum], *, shared: bool) -> dict[str, Any]:
    """The specification, once per panel if there is more than one."""
    names = [*dict.fromkeys(row["panel"] for row in rows)]
    if len(names) < 2:
        return spec
    own = {"x": "independent", **({} if shared else {"y": "independent"})}
    facet = {"field": "panel", "type": "nominal", "title": None, "sort": names}
    return {"facet": facet, "spec": spec, "resolve": {"scale": own}}


def hover(*fields: tuple[str, str]) -> list[dict[str, str]]:
    """What a pointer shows: `(field, its name)`."""
    return [{"field": field, "title": name} for field, name in fields]


@functools.singledispatch
def charts(figure: Any, results: Results) -> list[Chart]:
    """The charts of a figure, one per horizontal axis.

    Raises:
      NotImplementedError: If no function here knows the kind of figure.
    """
    raise NotImplementedError(f"No chart of a {type(figure).__name__}: register one.")


@charts.register
def _(figure: Lines, results: Results) -> list[Chart]:
    points, needed = of_kind(results.rows, "point"), {figure.y.name, *(x.name for x in figure.x)}
    points = [row for row in points if needed <= row.keys()]
    names = figure.names(points)
    styles = [figure.style(place, name) for place, name in enumerate(names)]
    colors = [to_hex(style.get("color", "black")) for style in styles]
    dashes = [DASHES[style.get("ls", style.get("linestyle", "-"))] for style in styles]
    panels: dict[tuple, dict[str, Any]] = {}
    for row in points:
        keys = {name: row[name] for name in (*figure.down, *figure.across)}
        panels[tuple(keys.values())] = keys
    found = []
    for x in figure.x:
        rows: list[Datum] = []
        for keys in panels.values():
            for name in names:
                wanted = {**keys, figure.by: name}.items()
                if own := [row for row in points if wanted <= row.items()]:
                    rows += _line(figure, own, x, {"panel": title(keys), "name": str(name)})
            rows += marks_of(figure, results, keys)
        spec = _of_lines(figure, x, rows, [*map(str, names)], colors, dashes)
        caption = figure.caption if len(figure.x) == 1 else f"{figure.caption}: {x.label}"
        found.append(Chart(caption, in_panels(spec, rows, shared=not figure.down), rows))
    return found


def _line(figure: Lines, own: list[dict[str, Any]], x: Axis, keys: Datum) -> list[Datum]:
    """The averages of a line, and the points of its runs."""
    positions, values = figure.curve(own, x)
    rows, y = [], figure.y
    for place, each in zip(positions, values, strict=True):
        sides = ends(each, figure.band)
        center = mean(each) if figure.center == "mean" else sorted(each)[len(each) // 2]
        rows.append(
            {**keys, "run": f"{figure.center} of {len(each)}", "x": number(x.scale * place, x.log),
             "y": number(y.scale * center, y.log), "low": number(y.scale * sides[0], y.log),
             "high": number(y.scale * sides[1], y.log)}
        )  # fmt: skip
    for row in own:
        at = number(x.scale * row[x.name], x.log), number(y.scale * row[y.name], y.log)
        rows.append({**keys, "run": f"seed {row.get('seed')}", "single": True,
                     "x": at[0], "y": at[1]})  # fmt: skip
    return rows


def _of_lines(
    figure: Lines, x: Axis, rows: list[Datum], names: list[str], colors: list, dashes: list
) -> dict[str, Any]:
    legend = {"orient": "bottom", "title": figure.by, "labelLimit": 0, "symbolLimit": 0}
    color = {"field": "name", "type": "nominal", "legend": legend,
             "scale": {"domain": names, "range": colors}}  # fmt: skip
    dash = {**color, "scale": {"domain": names, "range": dashes}}
    place = {"x": encoded("x", x, rows), "y": encoded("y", figure.y, rows)}
    chosen = {"condition": {"param": "chosen", "value": 1}, "value": 0.07}
    average = [{"filter": "!datum.single && isValid(datum.x) && isValid(datum.y)"}]
    single = [{"filter": "singles && datum.single && isValid(datum.y)"}]
    tip = hover(("panel", "setting"), ("name", figure.by), ("run", "run"),
                ("x", x.label), ("y", figure.y.label))  # fmt: skip
    line = {
        "mark": {"type": "line"},
        "transform": average,
        "params": [
            {"name": "chosen", "select": {"type": "point", "fields": ["name"]}, "bind": "legend"}
        ],
        "encoding": {**place, "color": color, "strokeDash": dash, "opacity": chosen},
    }
    band = {
        "mark": {"type": "area"},
        "transform": [*average, {"filter": "isValid(datum.low) && isValid(datum.high)"}],
        "encoding": {
            **place,
            "y": {**place["y"], "field": "low"},
            "y2": {"field": "high"},
            "color": color,
            "opacity": {**chosen, "condition": {"param": "chosen", "value": 0.12}, "value": 0},
        },
    }
    thin = {
        "mark": {"type": "line", "strokeWidth": 0.6},
        "transform": single,
        "encoding": {**place, "color": color, "detail": {"field": "run"}, "opacity": chosen},
    }
    dots = {"mark": {"type": "point", "filled": True, "size": 30},
            "transform": [{"filter": "(singles || !datum.single) && isValid(datum.x)"
                                     " && isValid(datum.y)"}],
            "encoding": {**place, "color": color, "tooltip": tip,
                         "opacity": {"condition": {"param": "chosen", "value": 0.5},
                                     "value": 0}}}  # fmt: skip
    layers = [line, dots, thin] + ([band] if any(map(figure.banded, names)) else [])
    if any("rule" in row for row in rows):
        layers.append({"mark": "rule", "transform": [{"filter": "isValid(datum.rule)"}],
                       "encoding": {"y": {**place["y"], "field": "rule"}}})  # fmt: skip
    return {"height": 260, "layer": layers}


@charts.register
def _(figure: Points, results: Results) -> list[Chart]:
    lines = [e for e in results.lines if all(map(math.isfinite, figure.position(e)[:2]))]
    styles = figure.marks(lines)
    rows = []
    for line in lines:
        x, y, below, above = figure.position(line)
        keys = {name: line.group.keys[name] for name in (*figure.down, *figure.across)}
        style = styles[id(line)]
        rows.append(
            {"panel": title(keys), "name": str(line.group.keys[figure.by]), "setting": line.where,
             "run": f"mean of {len(line.group.runs)}", "x": number(x, figure.x.log),
             "y": number(y, figure.y.log), "low": number(y - below, figure.y.log),
             "high": number(y + above, figure.y.log), "color": to_hex(style["color"]),
             "shape": SHAPES.get(style.get("marker", "o"), "cross"),
             "group": str(figure.joined(line)) if figure.joined else line.where}
        )  # fmt: skip
    rows = [row for row in rows if None not in (row["x"], row["y"])]
    place = {"x": encoded("x", figure.x, rows), "y": encoded("y", figure.y, rows)}
    color = {"field": "color", "type": "nominal", "scale": None}
    tip = hover(("setting", "setting"), ("run", "run"), ("x", figure.x.label),
                ("y", figure.y.label), ("low", "from"), ("high", "to"))  # fmt: skip
    bar = {**place, "y": {**place["y"], "field": "low"}, "y2": {"field": "high"}, "color": color}
    layers = [
        {"mark": {"type": "rule", "strokeWidth": 0.8}, "encoding": bar,
         "transform": [{"filter": "isValid(datum.low) && isValid(datum.high)"}]},
        {"mark": {"type": "line", "strokeDash": [4, 3], "strokeWidth": 1},
         "encoding": {**place, "color": color, "detail": {"field": "group"}}},
        {"mark": {"type": "point", "filled": True, "size": 70},
         "encoding": {**place, "color": color, "tooltip": tip,
                      "shape": {"field": "shape", "type": "nominal", "scale": None}}},
    ]  # fmt: skip
    if len(rows) <= 40:
        layers.append(
            {
                "mark": {"type": "text", "align": "left", "dx": 7, "fontSize": 9},
                "encoding": {**place, "text": {"field": "name"}, "color": color},
            }
        )
    spec = {"height": 340, "layer": layers}
    return [Chart(figure.caption, in_panels(spec, rows, shared=not figure.down), rows)]


@charts.register
def _(figure: Forest, results: Results) -> list[Chart]:
    rows = []
    for panel in figure.panels:
        for line in results.lines:
            if (found := panel.values(line)) is None:
                continue
            center, low, high = (
                number(min(max(value, -figure.limit), figure.limit)) for value in found[:3]
            )
            keys = line.group.keys
            rows.append({"panel": panel.title.partition("\n")[0], "name": str(keys[figure.by]),
                         "within": str(keys[figure.within]), "setting": line.where, "x": center,
                         "low": low, "high": high, "outcome": found[3],
                         "value": number(found[0])})  # fmt: skip
    names = [*dict.fromkeys(row["name"] for row in rows)]
    color = {"field": "outcome", "type": "nominal", "legend": {"orient": "bottom"},
             "scale": {"domain": [*figure.colors],
                       "range": [to_hex(each) for each in figure.colors.values()]}}  # fmt: skip
    label = {"labelLimit": 260, "title": None}
    y = {"field": "name", "type": "nominal", "sort": names, "axis": label, "title": None}
    common = {"y": y, "yOffset": {"field": "within"}, "color": color}
    x = {"type": "quantitative", "title": figure.panels[0].label.partition("\n")[0],
         "scale": {"domain": [-figure.limit, figure.limit]}}  # fmt: skip
    tip = hover(("setting", "setting"), ("value", "difference"), ("low", "from"), ("high", "to"),
                ("outcome", "outcome"))  # fmt: skip
    layers = [
        {"mark": "rule",
         "encoding": {**common, "x": {**x, "field": "low"}, "x2": {"field": "high"}},
         "transform": [{"filter": "isValid(datum.low) && isValid(datum.high)"}]},
        {"mark": {"type": "point", "filled": True}, "transform": [{"filter": "isValid(datum.x)"}],
         "encoding": {**common, "x": {**x, "field": "x"}, "tooltip": tip,
                      "shape": {"field": "within", "type": "nominal",
                                "legend": {"orient": "bottom"}}}},
    ]  # fmt: skip
    spec = {"height": {"step": 7}, "layer": layers}
    return [Chart(figure.caption, in_panels(spec, rows, shared=True), rows)]
