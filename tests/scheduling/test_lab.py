"""Simulated steps beside those that the lab measured on shaped links, from its newest record.

JAX sends after the backward pass on CPUs. A step without shaping has the computation and the codec,
so the link adds what the interface counted over its bandwidth. The latency of these links is 0.
"""

import csv
import statistics

import pytest

from jaxcomm.scheduling import AlphaBeta, LayerTimes, at_end_plan, timeline
from tests.records import committed

BANDWIDTHS = {"1gbit": 1e9 / 8, "200mbit": 2e8 / 8}


def test_predictions_are_within_a_tenth_of_the_lab() -> None:
    with (committed("*_lab")[-1] / "table.csv").open() as table:
        rows = {(row["link"], row["method"]): row for row in csv.DictReader(table)}
    compute = float(rows["unshaped", "no_communication"]["milliseconds"])
    errors = {}
    for (name, method), row in rows.items():
        if name not in BANDWIDTHS or method.startswith("ddp") or method == "no_communication":
            continue
        codec = float(rows["unshaped", method]["milliseconds"]) - compute
        times = LayerTimes([float(row["sent"])], [compute], encode=[max(codec, 0.0)])
        link = AlphaBeta(0.0, BANDWIDTHS[name] / 1e3)  # All seconds are milliseconds here.
        found = timeline(times, link, at_end_plan(times)).step_seconds
        errors[name, method] = abs(found / float(row["milliseconds"]) - 1)
    assert len(errors) >= 18 and statistics.median(errors.values()) < 0.05
    assert max(errors.values()) == pytest.approx(0, abs=0.12)
