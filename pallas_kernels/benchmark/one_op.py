"""Checks and times one op in a process of its own: `python -m pallas_kernels.benchmark.one_op`.

A kernel that hangs or ends the process costs its op, not the run. What is known is written at once.
"""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Leaves memory to PyTorch in the same process. JAX reads this at the first use of a device.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from pallas_kernels import _device, _tuned
from pallas_kernels.arg_specs import ROWS, Row
from pallas_kernels.benchmark import machine, torch_equivalents
from pallas_kernels.benchmark.candidates import Session, Variant, builders, check, variants
from pallas_kernels.benchmark.device_time import device_seconds
from pallas_kernels.benchmark.record import append
from pallas_kernels.benchmark.timing import Candidate, time_in_turn

LINE = "{:<38} {:>13} {:<11} {:>12} {:>8} {:>11} {:>9} {:>10}  {}"
HEAD = LINE.format(
    "op", "coordinates", "", "microseconds", "spread", "on device", "GB/s", "of a copy", ""
)


def _reason(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:300]


class Output:
    """Prints what is measured and appends it to the record."""

    def __init__(self, folder: Path, op: str):
        self.folder, self.op = folder, op

    def add(self, kind: str, **values: Any) -> None:
        """One row of metrics."""
        append(self.folder, {"kind": kind, "op": self.op, **values})

    def failed(self, row: Row, size: int, variant: Variant, reason: str) -> None:
        """A failure is a row."""
        what = f"{variant.name:<11} {variant.described}".rstrip()
        print(f"{row.label:<38} {size:>13,} {what} FAILED: {reason}", flush=True)
        self.add("failed", **keys(row, size, variant), reason=reason)


def keys(row: Row, size: int, variant: Variant) -> dict[str, Any]:
    """What was called, as the lines of a record have it."""
    called = {"label": row.label, "size": size, "implementation": variant.name}
    return called | {"config": dict(variant.config)}


def check_rows(
    rows: list[Row], sizes: Sequence[int], session: Session, output: Output
) -> set[tuple[str, Variant]]:
    """Compares every variant with the reference on the CPU; returns those that are wrong."""
    wrong, count = set(), 0
    for row in rows:
        compared = variants(row, session)
        count += len(compared)
        for size, variant in itertools.product(sizes, compared):
            try:
                reason = check(row, size, variant, session)
            except Exception as error:
                reason = _reason(error)
            output.add("check", **keys(row, size, variant), wrong=reason)
            if reason:
                wrong.add((row.label, variant))
                output.failed(row, size, variant, reason)
    right = count - len(wrong)
    print(f"{output.op}: {right} right, {len(wrong)} wrong, at {list(sizes)}", flush=True)
    return wrong


def time_row(
    row: Row, size: int, wrong: set[tuple[str, Variant]], session: Session, output: Output
) -> None:
    """Times what runs, in turn, and writes a row for each."""
    candidates: dict[Variant, Candidate] = {}
    for variant, build in builders(row, size, session).items():
        if (row.label, variant) in wrong:
            continue
        try:
            candidate = build()
            candidate.wait(candidate.call())
            candidates[variant] = candidate
        except Exception as error:
            output.failed(row, size, variant, _reason(error))
    if not candidates:
        return
    try:
        times = time_in_turn(candidates, session.samples, queue=session.queue)
    except Exception as error:
        together = Variant("+".join(variant.name for variant in candidates))
        output.failed(row, size, together, _reason(error))
        return
    copy = times.get(Variant("copy"))
    for variant, timing in times.items():
        try:
            on_device = device_seconds(candidates[variant], min(timing.calls, 20))
        except Exception as error:
            on_device = None
            output.failed(row, size, variant, f"profiler: {_reason(error)}")
        moved = 8 * size if variant.name == "copy" else row.traffic(size)
        share = moved / timing.median / (8 * size / copy.median) if copy and size else None
        print(
            LINE.format(
                row.label,
                f"{size:,}",
                variant.name,
                f"{1e6 * timing.median:,.1f}",
                f"{100 * timing.spread:.0f} %",
                "-" if on_device is None else f"{1e6 * on_device:,.1f}",
                f"{moved / timing.median / 1e9:,.1f}",
                "-" if share is None else f"{100 * share:.0f} %",
                variant.described,
            ).rstrip(),
            flush=True,
        )
        output.add(
            "time",
            **keys(row, size, variant),
            bytes=moved,
            calls=timing.calls,
            seconds=timing.seconds,
            device_seconds=on_device,
            share_of_copy=share,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks all rows of the op, then times them, sizes in the given order."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.benchmark.one_op")
    parser.add_argument("--op", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--sizes", type=json.loads, required=True)
    parser.add_argument("--check-sizes", type=json.loads, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--tune", action="store_true")
    options = parser.parse_args(arguments)
    output = Output(options.folder, options.op)
    rows = [row for row in ROWS if row.op.split(".")[0] == options.op]
    # No file of earlier measurements decides what is measured now.
    with _device.rehearsal(options.rehearse), _tuned.use(()):
        device = _device.target()
        torch = torch_equivalents.load() if device.platform == "cuda" else None
        session = Session(device, options.samples, torch, options.rehearse, options.tune)
        wrong = check_rows(rows, options.check_sizes, session, output)
        for size in options.sizes:
            for row in rows:
                time_row(row, size, wrong, session, output)
            output.add("clocks", size=size, **machine.gpu_state())
    return 0


if __name__ == "__main__":
    sys.exit(main())
