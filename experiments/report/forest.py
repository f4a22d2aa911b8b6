"""The chart of estimates with intervals around 0, one row per value of a key."""

from typing import Any

from matplotlib.colors import to_hex

from experiments.report.chart import SHAPES, Chart, Datum, hover, in_panels, number, where
from experiments.study.claims import Results
from experiments.study.forest import Forest


def charts(figure: Forest, results: Results) -> list[Chart]:
    """The chart of a figure."""
    rows: list[Datum] = []
    for panel in figure.panels:
        heading = " ".join(panel.title.split("\n"))
        notes: dict[str, Datum] = {}
        for line in results.lines:
            keys = line.group.keys
            common = {"panel": heading, "name": str(keys[figure.by]), "group": figure.group(line)}
            if (text := panel.note(line)) and common["name"] not in notes:
                notes[common["name"]] = {**common, "note": text, "within": str(keys[figure.within])}
            if (found := panel.values(line)) is None:
                continue
            center, low, high = (
                number(min(max(value, -figure.limit), figure.limit)) for value in found[:3]
            )
            beyond = "" if abs(found[0]) <= figure.limit else "beyond the axis"
            rows.append({**common, "within": str(keys[figure.within]), "setting": line.where,
                         "x": center, "low": low, "high": high, "outcome": found[3],
                         "value": number(found[0]), "beyond": beyond})  # fmt: skip
        rows += notes.values()
    return [Chart(figure.caption, in_panels(_spec(figure, rows), rows, shared=True), rows)]


def _spec(figure: Forest, rows: list[Datum]) -> dict[str, Any]:
    groups = [*dict.fromkeys(row["group"] for row in rows)]
    ordered = sorted(rows, key=lambda row: groups.index(row["group"]))
    names = [*dict.fromkeys(row["name"] for row in ordered)]
    kinds = [*dict.fromkeys(row["within"] for row in rows if "within" in row)]
    color = {"field": "outcome", "type": "nominal", "legend": {"orient": "bottom"},
             "scale": {"domain": [*figure.colors],
                       "range": [to_hex(each) for each in figure.colors.values()]}}  # fmt: skip
    label = {"labelLimit": 260, "title": None}
    y = {"field": "name", "type": "nominal", "sort": names, "axis": label, "title": None}
    common = {"y": y, "yOffset": {"field": "within", "sort": kinds}, "color": color}
    x = {"type": "quantitative", "title": figure.panels[0].label.split("\n"),
         "scale": {"domain": [-figure.limit, figure.limit]}}  # fmt: skip
    tip = hover(("group", "group"), ("setting", "setting"), ("value", "difference"),
                ("low", "from"), ("high", "to"), ("outcome", "outcome"),
                ("beyond", "place"))  # fmt: skip
    shapes = {"domain": kinds, "range": [SHAPES[mark] for mark in "osD^v"[: len(kinds)]]}
    layers = [
        {"data": {"values": [{"low": -figure.margin, "high": figure.margin}]},
         "mark": {"type": "rect", "opacity": 0.1, "color": "#808080"},
         "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}}},
        {"data": {"values": [{"x": 0}]}, "mark": "rule", "encoding": {"x": {**x, "field": "x"}}},
        {"mark": {"type": "rule", "clip": True},
         "encoding": {**common, "x": {**x, "field": "low"}, "x2": {"field": "high"}},
         "transform": where("low", "high")},
        {"mark": {"type": "point", "filled": True, "size": 40}, "transform": where("x"),
         "encoding": {**common, "x": {**x, "field": "x"}, "tooltip": tip,
                      "shape": {"field": "within", "type": "nominal", "scale": shapes,
                                "legend": {"orient": "bottom"}}}},
        {"mark": {"type": "text", "align": "right", "fontSize": 10}, "transform": where("note"),
         "encoding": {"y": y, "yOffset": common["yOffset"], "x": {**x, "datum": figure.limit},
                      "text": {"field": "note"}}},
    ]  # fmt: skip
    return {"height": {"step": 7}, "layer": layers}
