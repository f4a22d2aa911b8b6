"""The chart of estimates with intervals around 0, one row per value of a key."""

import math
from typing import Any

from matplotlib.colors import to_hex

from experiments.report.chart import SHAPES, Chart, Datum, hover, in_panels, listed, number, where
from experiments.study.claims import Results
from experiments.study.forest import Forest


def charts(figure: Forest, results: Results) -> list[Chart]:
    """The chart of a figure."""
    rows: list[Datum] = []
    for panel in figure.panels:
        notes: dict[str, Datum] = {}
        for line in results.lines:
            keys = line.group.keys
            common = {"panel": panel.title, "down": "", "across": panel.title,
                      "name": str(keys[figure.by]), "group": figure.group(line)}  # fmt: skip
            if (text := panel.note(line)) and common["name"] not in notes:
                notes[common["name"]] = {**common, "note": text, "within": str(keys[figure.within])}
            if (found := panel.values(line)) is None:
                continue
            center, low, high = (
                number(min(max(value, -figure.limit), figure.limit)) for value in found[:3]
            )
            if not all(map(math.isfinite, found[1:3])):
                low = high = None
            sides = {"right": found[0] > figure.limit, "left": found[0] < -figure.limit}
            beyond = "".join(f"{side} of the axis" for side, is_there in sides.items() if is_there)
            rows.append({**common, "within": str(keys[figure.within]), "setting": line.where,
                         "x": center, "low": low, "high": high, "outcome": found[3],
                         "value": number(found[0]), "beyond": beyond})  # fmt: skip
        rows += notes.values()
    names = _names(figure, results)
    kinds = [*dict.fromkeys(str(line.group.keys[figure.within]) for line in results.lines)]
    label = " ".join(figure.panels[0].label.split())
    description = f"{label}, by {figure.by}: {listed(names)}"
    spec = in_panels(_spec(figure, names, kinds), rows, shared=True)
    return [Chart(figure.caption, spec, rows, description)]


def _names(figure: Forest, results: Results) -> list[str]:
    """The names of the rows, of which those of a group are adjacent."""
    groups: dict[str, str] = {}
    for line in results.lines:
        groups.setdefault(str(line.group.keys[figure.by]), figure.group(line))
    places = [*dict.fromkeys(groups.values())]
    return sorted(groups, key=lambda name: places.index(groups[name]))


def _spec(figure: Forest, names: list[str], kinds: list[str]) -> dict[str, Any]:
    color = {"field": "outcome", "type": "nominal", "legend": {"orient": "bottom"},
             "scale": {"domain": [*figure.colors],
                       "range": [to_hex(each) for each in figure.colors.values()]}}  # fmt: skip
    label = {"labelLimit": 260, "title": None}
    y = {"field": "name", "type": "nominal", "axis": label, "title": None,
         "scale": {"domain": names}}  # fmt: skip
    common = {"y": y, "yOffset": {"field": "within", "sort": kinds}, "color": color}
    x = {"type": "quantitative", "title": figure.panels[0].label.split("\n"),
         "scale": {"domain": [-figure.limit, figure.limit]}}  # fmt: skip
    tip = hover(("group", "group"), ("setting", "setting"), ("value", "difference"),
                ("low", "from"), ("high", "to"), ("outcome", "outcome"),
                ("beyond", "place"))  # fmt: skip
    shapes = {"domain": kinds, "range": [SHAPES[mark] for mark in "osD^v"[: len(kinds)]]}
    arrows = [{"test": f"datum.beyond === '{side} of the axis'", "value": f"triangle-{side}"}
              for side in ("left", "right")]  # fmt: skip
    layers = [
        {"data": {"values": [{"low": -figure.margin, "high": figure.margin}]},
         "mark": {"type": "rect", "opacity": 0.1, "color": "#808080"},
         "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}}},
        {"data": {"values": [{"x": 0}]}, "mark": "rule", "encoding": {"x": {**x, "field": "x"}}},
        {"mark": {"type": "rule", "clip": True},
         "encoding": {**common, "x": {**x, "field": "low"}, "x2": {"field": "high"}},
         "transform": where("low", "high")},
        {"mark": {"type": "point", "filled": True, "size": 40, "opacity": 1},
         "transform": where("x"),
         "encoding": {**common, "x": {**x, "field": "x"}, "tooltip": tip,
                      "shape": {"condition": arrows, "field": "within", "type": "nominal",
                                "scale": shapes, "legend": {"orient": "bottom"}}}},
        {"mark": {"type": "text", "align": "left", "dx": 6, "fontSize": 10},
         "transform": where("note"),
         "encoding": {"y": y, "yOffset": common["yOffset"], "x": {**x, "datum": figure.limit},
                      "text": {"field": "note"}}},
    ]  # fmt: skip
    return {"height": {"step": 7}, "layer": layers}
