"""The goals of the kernels on an NVIDIA H200, and whether they were reached."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pallas_kernels._dispatch import Measured
from pallas_kernels.arg_specs import ROWS, Row

LARGE = 2**26
"""Goals apply from this size on: smaller arrays stay in the cache."""


class Measurement(NamedTuple):
    """The time of one implementation of one row of the table of workloads, at one size."""

    row: Row
    size: int
    implementation: str
    seconds: float  # The median.
    share_of_copy: float


def read(metrics: Iterable[Mapping[str, Any]]) -> list[Measurement]:
    """The measurements in the lines of a record; those of rows that no longer exist are skipped."""
    by_label = {row.label: row for row in ROWS}
    return [
        Measurement(
            by_label[line["label"]],
            line["size"],
            line["implementation"],
            statistics.median(line["seconds"]),
            line["share_of_copy"] or 0.0,
        )
        for line in metrics
        if line["kind"] == "time" and line["label"] in by_label
    ]


def measured_rows(measurements: Sequence[Measurement], kind: str, record: str) -> list[Measured]:
    """Rows of the table of the dispatch: the fastest implementation from each size on."""
    fastest: dict[tuple[str, int], Measurement] = {}
    for m in measurements:
        if m.implementation in ("copy", "torch"):
            continue
        key = m.row.label, m.size
        if key not in fastest or m.seconds < fastest[key].seconds:
            fastest[key] = m
    found: list[Measured] = []
    last: dict[str, str] = {}
    for (label, size), m in sorted(fastest.items()):
        workload = m.row.workload(size)
        if workload is None or last.get(label) == m.implementation:
            continue
        last[label] = m.implementation
        found.append(
            Measured(
                workload.op,
                kind,
                size,
                m.implementation,  # type: ignore[arg-type]
                record,
                workload.dtype,
                workload.bits,
                workload.residual,
                workload.rows,
            )
        )
    return found


def _verdict(what: str, reached: dict[int, float], goal: float) -> str:
    if not reached:
        return f"{what}: not measured"
    worst = min(reached, key=lambda size: reached[size])
    word = "reached" if reached[worst] >= goal else "not reached"
    return f"{what}: {word}, {reached[worst]:.2f} at {worst:,} coordinates"


def verdicts(rows: Iterable[Row], measurements: Sequence[Measurement], on_gpu: bool) -> list[str]:
    """A line for each goal: the fastest implementation at the worst size."""
    lines = []
    for row in rows:
        fastest: dict[int, Measurement] = {}
        torch: dict[int, float] = {}
        for m in measurements:
            if not on_gpu or m.row.label != row.label or m.size < LARGE:
                continue
            if m.implementation == "copy":
                continue
            if m.implementation == "torch":
                torch[m.size] = m.seconds
            elif m.size not in fastest or m.seconds < fastest[m.size].seconds:
                fastest[m.size] = m
        if row.share_of_copy is not None:
            shares = {size: m.share_of_copy for size, m in fastest.items()}
            what = f"{row.label}, at least {row.share_of_copy:g} of a copy"
            lines.append(_verdict(what, shares, row.share_of_copy))
        if row.times_torch is not None:
            ratios = {size: torch[size] / m.seconds for size, m in fastest.items() if size in torch}
            what = f"{row.label}, at least {row.times_torch:g} times PyTorch"
            lines.append(_verdict(what, ratios, row.times_torch))
    return lines
