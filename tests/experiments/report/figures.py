"""Results made by hand, and what a specification of Vega-Lite says."""

import json
from typing import Any

import vl_convert

from experiments.report.chart import Chart
from experiments.study.claims import Results
from experiments.study.columns import Column, Table, key
from experiments.study.groups import first, spread
from experiments.study.tidy import Row, make_row

TABLE = Table(
    ("split", "graph", "method"),
    (key("split"), key("graph"), key("method"), Column("loss", spread("loss")),
     Column("bytes", first("bytes"))),
)  # fmt: skip
KEYS = {"split": "iid", "graph": "ring", "method": "mean"}


def runs(losses: list[list[float]], **keys: Any) -> list[Row]:
    """The points and the ends of runs, of the losses of each seed at the steps 1, 2, ..."""
    rows = []
    for seed, own in enumerate(losses):
        named = {**KEYS, **keys, "seed": seed}
        for step, loss in enumerate(own, 1):
            rows.append(make_row("point", named, {"step": step, "loss": loss}))
        rows.append(make_row("run", named, {"loss": own[-1], "bytes": 100.0 * (1 + seed)}))
    return rows


def results(*groups: list[Row], table: Table = TABLE) -> Results:
    """What a study has of some rows."""
    rows = [row for group in groups for row in group]
    return Results(None, rows, table.lines(rows))


def compiled(chart: Chart) -> dict[str, Any]:
    """The specification of Vega; what the compiler warns of is on the standard error."""
    return vl_convert.vegalite_to_vega(whole(chart), show_warnings=True)


def whole(chart: Chart) -> dict[str, Any]:
    """The specification as the page has it."""
    text = json.dumps([chart.spec, chart.rows], allow_nan=False)  # As the page stores it.
    spec, rows = json.loads(text)
    return {**spec, "params": [{"name": "singles", "value": False}], "data": {"values": rows}}


def layers(chart: Chart) -> list[dict[str, Any]]:
    """What is drawn in a panel."""
    return chart.spec.get("spec", chart.spec)["layer"]
