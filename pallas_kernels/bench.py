"""`python -m pallas_kernels.bench`: are the ops right, and how fast, on this device, in 8 minutes.

Each op runs in a process of its own. It first compares every implementation with the reference on
the CPU. Then it times them: the sizes of the goals first, 2**26, one that needs padding, and 2**28;
smaller ones after. A failure is a line of the record, and the run goes on. The record is written
line by line, so what is known when the time is over is kept.

A sample queues many calls on the device and waits for the last. "microseconds" is the wall clock
per call; "on device" is the time in which JAX's profiler sees the device busy. Below about 2**22
coordinates the wall clock is mostly the time in which the host starts a call. All calls read the
same arrays, so arrays smaller than the device's cache (50 MB on an H200) stay in the cache. On a
CPU the benchmark waits for every call.

Bytes are those that the op has to move: its arguments and results once; for encoding a sketch, x
once for each row. "of a copy" is the op's bytes per second divided by those of `x + 1` on float32
of the same size, timed in turn with it. PyTorch's column times `torch_equivalents`.

`--tune` checks and times each kernel in several configs, at fewer sizes, in 16 minutes. It writes
what was fastest to `measured.jsonl` in the record. `PALLAS_KERNELS_MEASURED=FILE` and the context
`pallas_kernels.measured(FILE)` make the ops choose by this file.

`--rehearse` runs the same program on a CPU, with the kernels for GPU in JAX's interpreter.
"""

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pallas_kernels import _tuned
from pallas_kernels.arg_specs import ROWS
from pallas_kernels.benchmark.goals import measured_rows, read, verdicts
from pallas_kernels.benchmark.one_op import HEAD
from pallas_kernels.benchmark.processes import run_limited
from pallas_kernels.benchmark.record import Record, ask_for_device, describe_environment

# In the order in which ops run: those with goals first.
OPS = tuple(
    dict.fromkeys(
        row.op.split(".")[0] for row in sorted(ROWS, key=lambda row: row.share_of_copy is None)
    )
)
PADDED = 77  # Coordinates beyond a power of two, so that every kernel has to pad.
SIZES = {
    "cpu": (2**16, 2**16 + PADDED, 2**20),
    "other": (2**26, 2**26 + PADDED, 2**28, 2**22, 2**18),
    "rehearsal": (2**11, 2**11 + PADDED),
}
TUNED_SIZES = {"cpu": (2**20,), "other": (2**26, 2**22, 2**18), "rehearsal": (2**11,)}
CHECK_SIZES = {"cpu": (1, 3001), "other": (1, 1001, 2**20, 3_000_001), "rehearsal": (1001,)}
SAMPLES = {"cpu": 3, "other": 7, "rehearsal": 1}
MINUTES, TUNED_MINUTES = 8.0, 16.0
MEASURED = "measured.jsonl"


class Parser(argparse.ArgumentParser):
    """Reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        """Prints the message and exits with code 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; None selects a default by device."""
    parser = Parser(prog="python -m pallas_kernels.bench", description=(__doc__ or "").strip())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--sizes", nargs="+", type=int, metavar="B", help="2**B coordinates, B in 0 to 31")
    add("--ops", nargs="+", choices=OPS, default=OPS, metavar="OP", help=f"of {', '.join(OPS)}")
    add("--samples", type=int, metavar="N", help="samples of each time, at least 1")
    add("--minutes", type=float, metavar="M", help="the time for all ops, by default 8 or 16")
    add("--output", type=Path, metavar="DIR", help="a new folder for the record")
    add("--tune", action="store_true", help=f"time configs of kernels, write {MEASURED}")
    add("--rehearse", action="store_true", help="on a CPU, kernels for GPU in the interpreter")
    options = parser.parse_args(arguments)
    for exponent in options.sizes or ():
        if not 0 <= exponent <= 31:
            parser.error(f"argument --sizes: must be in 0 to 31, got {exponent}")
    if options.samples is not None and options.samples < 1:
        parser.error(f"argument --samples: must be at least 1, got {options.samples}")
    if options.minutes is None:
        options.minutes = TUNED_MINUTES if options.tune else MINUTES
    if not options.minutes > 0:
        parser.error(f"argument --minutes: must be positive, got {options.minutes:g}")
    if options.output is not None and options.output.exists():
        parser.error(f"argument --output: {options.output} already exists")
    if options.output is None:
        now = datetime.datetime.now(datetime.UTC)
        options.output = Path(f"pallas_kernels_bench/{now:%Y-%m-%d_%H%M%S}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0 if every implementation is right and every op finished."""
    options = parse(arguments)
    start = time.monotonic()
    if options.rehearse:
        os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        device = ask_for_device()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    kind = "cpu" if device["platform"] == "cpu" else "other"
    kind = "rehearsal" if options.rehearse else kind
    defaults = (TUNED_SIZES if options.tune else SIZES)[kind]
    sizes = [2**exponent for exponent in options.sizes] if options.sizes else defaults
    samples = options.samples or SAMPLES[kind]
    config = {
        "sizes": list(sizes),
        "check_sizes": list(CHECK_SIZES[kind]),
        "ops": list(options.ops),
        "samples": samples,
        "minutes": options.minutes,
        "rehearse": options.rehearse,
        "tune": options.tune,
        "seeds": "fixed",
    }
    try:
        command_line = list(sys.argv[1:] if arguments is None else arguments)
        record = Record(options.output, config, describe_environment(device, command_line))
    except OSError as error:
        print(f"cannot create {options.output}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"{device['devices']}; record in {options.output}\n{HEAD}", flush=True)
    for index, op in enumerate(options.ops):
        left = 60 * options.minutes - (time.monotonic() - start)
        limit = max(left / (len(options.ops) - index), 0)
        command = [
            *("-m", "pallas_kernels.benchmark.one_op", "--op", op),
            *("--folder", str(options.output), "--samples", str(samples)),
            *("--sizes", json.dumps(config["sizes"])),
            *("--check-sizes", json.dumps(config["check_sizes"])),
            *(["--rehearse"] if options.rehearse else []),
            *(["--tune"] if options.tune else []),
        ]
        # Each op may use its share of the time that is left.
        reason = run_limited(command, limit, os.environ, lambda line: print(line, flush=True))
        if reason:
            print(f"{op} did not finish: {reason}", flush=True)
            record.add({"kind": "unfinished", "op": op, "reason": reason})
    # Only now, when no other process needs the device.
    metrics = record.rows()
    measurements = read(metrics)
    found = measured_rows(measurements, device["kind"], options.output.name)
    rows = [row for row in ROWS if row.op.split(".")[0] in options.ops]
    print("\nGoals on an H200, from 2**26 coordinates on:")
    for line in verdicts(rows, measurements, "H200" in device["kind"]):
        print(line)
    if kind == "other":
        print("\nRows of MEASURED in pallas_kernels/_measured.py:")
        for measured in found:
            print(f"    {measured},")
    if options.tune:
        file = options.output / MEASURED
        _tuned.write(file, found)
        print(f"\n{len(found)} rows in {file}. To use them: {_tuned.VARIABLE}={file}")
    bad = [row for row in metrics if row["kind"] in ("failed", "unfinished")]
    print(f"\n{len(measurements)} times, {len(bad)} failures, {time.monotonic() - start:.0f} s.")
    record.finish()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
