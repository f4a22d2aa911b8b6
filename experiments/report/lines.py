"""The chart of lines: averages with bands, and the single runs behind them."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.colors import to_hex

from experiments.report.chart import (
    DASHES,
    Chart,
    Datum,
    encoded,
    hover,
    in_panels,
    number,
    title,
    where,
)  # fmt: skip
from experiments.report.finished import finished, layers
from experiments.study.claims import Results
from experiments.study.figure import Lines, ends
from experiments.study.panels import Axis
from experiments.study.tidy import of_kind

AVERAGES = {"mean": np.mean, "median": np.median}


def charts(figure: Lines, results: Results) -> list[Chart]:
    """The charts of a figure, one per horizontal axis."""
    points, needed = of_kind(results.rows, "point"), {figure.y.name, *(x.name for x in figure.x)}
    points = [row for row in points if needed <= row.keys()]
    names = figure.names(points)
    panels: dict[tuple, dict[str, Any]] = {}
    for row in points:
        keys = {name: row[name] for name in (*figure.down, *figure.across)}
        panels[tuple(keys.values())] = keys
    found = []
    for x in figure.x:
        rows: list[Datum] = []
        tops = set()
        for keys in panels.values():
            for name in names:
                wanted = {**keys, figure.by: name}.items()
                if own := [row for row in points if wanted <= row.items()]:
                    rows += _line(figure, own, x, {"panel": title(keys), "name": str(name)}, name)
            added = finished(figure, results, keys)
            rows += added.rows
            tops.add(added.top)
        spec = _spec(figure, x, rows, names, tops.pop() if len(tops) == 1 else None)
        caption = figure.caption if len(figure.x) == 1 else f"{figure.caption}: {x.label}"
        rows += _same_scales(figure, rows, panels)
        found.append(Chart(caption, in_panels(spec, rows, shared=not figure.down), rows))
    return found


def _same_scales(figure: Lines, rows: list[Datum], panels: Mapping[tuple, Any]) -> list[Datum]:
    """The lowest and the highest value of a row of panels, which each of its panels shows."""
    found: list[Datum] = []
    for down in {tuple(keys[name] for name in figure.down) for keys in panels.values()}:
        own = {title(keys) for keys in panels.values()
               if tuple(keys[name] for name in figure.down) == down}  # fmt: skip
        shown = [row for row in rows if row["panel"] in own and not row.get("single")]
        heights = [row[side] for row in shown for side in ("y", "low", "high", "rule")
                   if row.get(side) is not None]  # fmt: skip
        if heights:
            found += [{"panel": name, "extent": end} for name in sorted(own)
                      for end in (min(heights), max(heights))]  # fmt: skip
    return found


def _line(figure: Lines, own: list[Any], x: Axis, keys: Datum, name: Any) -> list[Datum]:
    """The averages of a line, and the points of its runs."""
    positions, values = figure.curve(own, x)
    rows, y = [], figure.y
    for place, each in zip(positions, values, strict=True):
        center = float(AVERAGES[figure.center](each))
        low, high = ends(each, figure.band) if figure.banded(name) else (math.nan, math.nan)
        if y.log:
            low = max(low, center / 10) if math.isfinite(low) else low
        rows.append(
            {**keys, "run": f"{figure.center} of {len(each)}", "x": number(x.scale * place, x.log),
             "y": number(y.scale * center, y.log), "low": number(y.scale * low, y.log),
             "high": number(y.scale * high, y.log)}
        )  # fmt: skip
    for row in own:
        at = number(x.scale * row[x.name], x.log), number(y.scale * row[y.name], y.log)
        rows.append({**keys, "run": f"seed {row.get('seed')}", "single": True,
                     "x": at[0], "y": at[1]})  # fmt: skip
    return rows


def _spec(
    figure: Lines, x: Axis, rows: list[Datum], values: list[Any], top: float | None
) -> dict[str, Any]:
    names = [*map(str, values)]
    styles = [figure.style(place, name) for place, name in enumerate(values)]
    colors = [to_hex(style.get("color", "black")) for style in styles]
    dashes = [DASHES[style.get("ls", style.get("linestyle", "-"))] for style in styles]
    legend = {"orient": "bottom", "title": figure.by, "labelLimit": 0, "symbolLimit": 0}
    color = {"field": "name", "type": "nominal", "legend": legend,
             "scale": {"domain": names, "range": colors}}  # fmt: skip
    dash = {**color, "scale": {"domain": names, "range": dashes}}
    place = {"x": encoded("x", x, rows), "y": encoded("y", figure.y, rows)}
    if top is not None:
        place["y"]["scale"] = {**place["y"]["scale"], "domainMax": top}
    chosen = {"condition": {"param": "chosen", "value": 1}, "value": 0.07}
    average = [{"filter": "!datum.single"}, *where("x", "y")]
    tip = hover(("panel", "setting"), ("name", figure.by), ("run", "run"), ("x", x.label),
                ("y", figure.y.label), ("low", "band from"), ("high", "to"))  # fmt: skip
    line = {
        "mark": {"type": "line", "clip": True},
        "transform": average,
        "params": [
            {"name": "chosen", "select": {"type": "point", "fields": ["name"]}, "bind": "legend"}
        ],
        "encoding": {
            **place, "color": color, "strokeDash": dash, "opacity": chosen,
        },
    }  # fmt: skip
    band = {
        "mark": {"type": "area", "clip": True},
        "transform": [*average, *where("low", "high")],
        "encoding": {
            **place,
            "y": {**place["y"], "field": "low"},
            "y2": {"field": "high"},
            "color": color,
            "opacity": {**chosen, "condition": {"param": "chosen", "value": 0.15}, "value": 0},
        },
    }
    thin = {
        "mark": {"type": "line", "strokeWidth": 0.6, "clip": True},
        "transform": [{"filter": "singles && datum.single"}, *where("x", "y")],
        "encoding": {**place, "color": color, "detail": {"field": "run"}, "opacity": chosen},
    }
    dots = {"mark": {"type": "point", "filled": True, "size": 30, "clip": True},
            "transform": [{"filter": "singles || !datum.single"}, *where("x", "y")],
            "encoding": {**place, "color": color, "tooltip": tip,
                         "opacity": {"condition": {"param": "chosen", "value": 0.5},
                                     "value": 0}}}  # fmt: skip
    extent = {"mark": {"type": "point", "opacity": 0, "clip": True}, "transform": where("extent"),
              "encoding": {"x": {"value": 0}, "y": {**place["y"], "field": "extent"}}}  # fmt: skip
    banded = any(row.get("low") is not None for row in rows)
    drawn = [line, dots, thin, *([band] if banded else []), extent]
    return {"height": 260, "layer": [*drawn, *layers(rows, place["x"], place["y"])]}
