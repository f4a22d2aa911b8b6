"""What the `finish` of a figure adds to a panel: rules, bands, texts, a legend and a limit."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from experiments.report.chart import Datum, number, title, where
from experiments.study.claims import Results
from experiments.study.panels import Panels


class Finished(NamedTuple):
    """What is added to a panel.

    Attributes:
      rows: The rules, the bands and the texts.
      legend: The texts of the colors.
      top: The upper end of the vertical axis.
    """

    rows: list[Datum]
    legend: dict[str, str]
    top: float | None


def finished(figure: Panels, results: Results, keys: Mapping[str, Any]) -> Finished:
    """Finishes an empty panel, and reads what it has."""
    if figure.finish is None:
        return Finished([], {}, None)
    axes = Figure().subplots()
    figure.finish(axes, results, keys)
    rows: list[Datum] = []
    for line in axes.lines:
        across = line.get_transform() is axes.get_yaxis_transform(which="grid")
        ends = line.get_ydata() if across else line.get_xdata()
        rows.append({"rule" if across else "vertical": number(ends[0])})
    for patch in axes.patches:
        low, high = patch.get_y(), patch.get_y() + patch.get_height()
        rows.append({"from": number(low), "to": number(high)})
    for text in axes.texts:
        (x, y), inside = text.get_position(), text.get_transform() is axes.transAxes
        rows.append(
            {"text": text.get_text(), "across": x if inside else None, "up": y,
             "at": None if inside else number(x), "color": to_hex(text.get_color()),
             "angle": -text.get_rotation()}
        )  # fmt: skip
    if (box := axes.get_legend()) is None:
        legend = {}
    else:
        entries = zip(box.get_texts(), box.legend_handles, strict=True)
        legend = {text.get_text(): to_hex(handle.get_color()) for text, handle in entries}
    limited = not axes.get_autoscaley_on() and not axes.lines
    kept = [{"panel": title(keys), **row} for row in rows if any(map(_is_given, row.values()))]
    return Finished(kept, legend, axes.get_ylim()[1] if limited else None)


def _is_given(value: Any) -> bool:
    return value is not None


def layers(rows: list[Datum], x: Mapping[str, Any], y: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The layers of what is added, on the scales of the data."""
    side = "child_" if any(row["panel"] for row in rows) else ""  # Of a panel, not of all.
    found: list[dict[str, Any]] = []
    if any(row.get("from") is not None for row in rows):
        found.append({"mark": {"type": "rect", "opacity": 0.07}, "transform": where("from", "to"),
                      "encoding": {"y": {**y, "field": "from"}, "y2": {"field": "to"},
                                   "color": {"value": "#808080"}}})  # fmt: skip
    if any(row.get("rule") is not None for row in rows):
        found.append({"mark": "rule", "transform": where("rule"),
                      "encoding": {"y": {**y, "field": "rule"}}})  # fmt: skip
    if any(row.get("vertical") is not None for row in rows):
        found.append({"mark": {"type": "rule", "strokeDash": [2, 3]},
                      "transform": where("vertical"),
                      "encoding": {"x": {**x, "field": "vertical"}}})  # fmt: skip
    mark = {"type": "text", "align": "left", "baseline": "bottom", "fontSize": 11}
    up = {"value": {"expr": f"{side}height - 6"}}
    angles = {row["angle"] for row in rows if row.get("at") is not None and "angle" in row}
    for angle in sorted(angles):
        found.append({"mark": {**mark, "angle": angle, "dy": 12}, "transform": where("text", "at"),
                      "encoding": {"x": {**x, "field": "at"}, "y": up,
                                   "text": {"field": "text"}}})  # fmt: skip
    places = {(row["across"], row["up"]) for row in rows if row.get("across") is not None}
    for across, height in sorted(places):
        found.append({"mark": {**mark, "fontSize": 12},
                      "transform": [*where("text", "across"),
                                    {"filter": f"datum.up === {height}"}],
                      "encoding": {"x": {"value": {"expr": f"{side}width * {across}"}},
                                   "y": {"value": {"expr": f"{side}height * (1 - {height})"}},
                                   "text": {"field": "text"},
                                   "color": {"field": "color", "type": "nominal",
                                             "scale": None}}})  # fmt: skip
    return found
