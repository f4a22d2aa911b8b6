"""The chart of points: lines of the table with bars, names or numbers, and what colors mean."""

import math
from typing import Any

from matplotlib.colors import to_hex

from experiments.report.chart import (
    SHAPES,
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
from experiments.study.figure import Points

MOST_NAMES = 40  # More would cover each other, so points have numbers.


def charts(figure: Points, results: Results) -> list[Chart]:
    """The chart of a figure."""
    lines = [e for e in results.lines if all(map(math.isfinite, figure.position(e)[:2]))]
    names = [str(name) for name in figure.names([line.group.keys for line in lines])]
    styles = figure.marks(lines)
    rows: list[Datum] = []
    meanings: dict[str, str] = {}
    panels = {}
    for line in lines:
        x, y, below, above = figure.position(line)
        keys = {name: line.group.keys[name] for name in (*figure.down, *figure.across)}
        panels[title(keys)] = keys
        style, name = styles[id(line)], str(line.group.keys[figure.by])
        color = to_hex(style["color"])
        if "label" in style:
            meanings.setdefault(style["label"], color)
        rows.append(
            {"panel": title(keys), "name": name, "number": str(names.index(name) + 1),
             "setting": line.where, "run": f"mean of {len(line.group.runs)}",
             "x": number(x, figure.x.log), "y": number(y, figure.y.log),
             "low": number(y - below, figure.y.log), "high": number(y + above, figure.y.log),
             "color": color, "shape": SHAPES[style.get("marker", "o")],
             "group": str(figure.joined(line)) if figure.joined else line.where}
        )  # fmt: skip
    rows = [row for row in rows if None not in (row["x"], row["y"])]
    numbered = figure.numbered or len(rows) > MOST_NAMES
    note = ", ".join(f"{place} {name}" for place, name in enumerate(names, 1)) if numbered else ""
    for keys in panels.values():
        added = finished(figure, results, keys)
        rows += added.rows
        meanings |= added.legend
    spec = _spec(figure, rows, meanings, "number" if numbered else "name")
    return [Chart(figure.caption, in_panels(spec, rows, shared=not figure.down), rows, note)]


def _spec(figure: Points, rows: list[Datum], meanings: dict[str, str], text: str) -> dict[str, Any]:
    place = {"x": encoded("x", figure.x, rows), "y": encoded("y", figure.y, rows)}
    color = {"field": "color", "type": "nominal", "scale": None}
    tip = hover(("panel", "panel"), ("setting", "setting"), ("run", "run"),
                ("x", figure.x.label), ("y", figure.y.label), ("low", "from"),
                ("high", "to"))  # fmt: skip
    bar = {**place, "y": {**place["y"], "field": "low"}, "y2": {"field": "high"}, "color": color}
    join = {"mark": {"type": "line", "strokeDash": [4, 3], "strokeWidth": 1},
            "transform": where("x", "y"),
            "encoding": {**place, "color": color, "detail": {"field": "group"}}}  # fmt: skip
    point = {"mark": {"type": "point", "filled": True, "size": 70, "opacity": 0.8},
             "transform": where("x", "y"),
             "encoding": {**place, "color": color, "tooltip": tip,
                          "shape": {"field": "shape", "type": "nominal",
                                    "scale": None}}}  # fmt: skip
    label = {"mark": {"type": "text", "align": "left", "dx": 7, "fontSize": 10},
             "transform": where("x", "y"),
             "encoding": {**place, "text": {"field": text}, "color": color}}  # fmt: skip
    drawn = [
        {"mark": {"type": "rule", "strokeWidth": 0.8}, "encoding": bar,
         "transform": where("low", "high")},
        *([join] if figure.joined else []), point, label,
    ]  # fmt: skip
    if meanings:
        legend = {"orient": "bottom", "title": None, "labelLimit": 0, "symbolLimit": 0,
                  "symbolType": "square", "symbolStrokeWidth": 0, "symbolOpacity": 1}  # fmt: skip
        scale = {"domain": [*meanings], "range": [*meanings.values()]}
        drawn.append({"mark": {"type": "point", "filled": True, "opacity": 0},
                      "transform": [{"calculate": "'no row'", "as": "meaning"}],
                      "encoding": {"fill": {"field": "meaning", "type": "nominal",
                                            "legend": legend, "scale": scale}}})  # fmt: skip
    return {"height": 380, "layer": [*drawn, *layers(rows, place["x"], place["y"])]}
