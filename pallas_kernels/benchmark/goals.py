"""The goals of the kernels on an NVIDIA H200, and whether they were reached."""

import functools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pallas_kernels._configs import Fields
from pallas_kernels._measurements import Measured, Workload
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
    config: Fields = ()


def read(metrics: Iterable[Mapping[str, Any]]) -> list[Measurement]:
    """The measurements in the results of a record; those of rows that are no more are skipped."""
    by_label = {row.label: row for row in ROWS}
    return [
        Measurement(
            by_label[line["label"]],
            line["size"],
            line["implementation"],
            statistics.median(line["seconds"]),
            line["share_of_copy"] or 0.0,
            tuple(line.get("config", {}).items()),
        )
        for line in metrics
        if line["kind"] == "time" and line["label"] in by_label
    ]


def measured_rows(measurements: Sequence[Measurement], kind: str, record: str) -> list[Measured]:
    """Rows of the table of the dispatch: the fastest implementation and config from each size on.

    Of calls that are equal to the dispatch, the seconds are added. What failed for one of them does
    not count.
    """
    workload_of = functools.cache(lambda row, size: row.workload(size))
    by_workload: dict[Workload, dict[tuple[str, Fields], dict[str, float]]] = {}
    for m in measurements:
        workload = workload_of(m.row, m.size)
        if workload is not None and m.implementation not in ("copy", "torch"):
            variants = by_workload.setdefault(workload, {})
            variants.setdefault((m.implementation, m.config), {})[m.row.label] = m.seconds
    found: list[Measured] = []
    last: dict[Workload, tuple[str, Fields]] = {}
    for workload in sorted(by_workload, key=lambda w: (str(w._replace(size=0)), w.size)):
        variants = by_workload[workload]
        calls = max(map(len, variants.values()))
        sums = {
            v: sum(by_call.values()) for v, by_call in variants.items() if len(by_call) == calls
        }
        name, config = fastest = min(sums, key=lambda variant: sums[variant])
        of_any_size = workload._replace(size=0)
        if last.get(of_any_size) == fastest:
            continue
        last[of_any_size] = fastest
        found.append(
            Measured(
                workload.op,
                kind,
                workload.size,
                name,  # type: ignore[arg-type]
                record,
                workload.dtype,
                workload.bits,
                workload.residual,
                workload.rows,
                config,
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
