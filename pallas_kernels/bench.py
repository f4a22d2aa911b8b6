"""`python -m pallas_kernels.bench`: are the ops right, and how fast, on this device.

The part `right` compares every implementation with the reference on the CPU, bit for bit where that
is promised. The part `times` then times them at 2**28 and 2**24 coordinates, those first that users
run by default, and then PyTorch's equivalents (`torch_equivalents`).

Each measurement is a line of the record. `--output` may name a record: its run goes on with what
has no line yet. A kernel that fails, hangs or ends its process costs itself only.

A sample queues many calls on the device and waits for the last. "microseconds" is the wall clock
per call; "on device" is the time in which JAX's profiler sees the device busy. Below about 2**22
coordinates the wall clock is mostly the time in which the host starts a call. All calls read the
same arrays, so arrays smaller than the device's cache (50 MB on an H200) stay in the cache. On a
CPU the benchmark waits for every call.

Bytes are those that the op has to move: its arguments and results once; for encoding a sketch, x
once for each row. "of a copy" is the op's bytes per second divided by those of `x + 1` on float32
of the same size, timed in turn with it.

`--tune` checks and times each kernel in several configs, at fewer sizes, in 16 minutes. It writes
what was fastest to `measured.jsonl` in the record. `PALLAS_KERNELS_MEASURED=FILE` and the context
`pallas_kernels.measured(FILE)` make the ops choose by this file.

`--rehearse` runs the same program on a CPU, with the kernels for GPU in JAX's interpreter.
"""

import argparse
import datetime
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pallas_kernels import _measurements
from pallas_kernels.arg_specs import ROWS
from pallas_kernels.benchmark import parts
from pallas_kernels.benchmark.goals import measured_rows, read, verdicts
from pallas_kernels.benchmark.ops import HEAD, OPS, PARTS, TIMES, TUNED_PARTS
from pallas_kernels.benchmark.record import Record, ask_for_device

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
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="the folder of the record; one that exists is continued",
    )
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
    if options.output is None:
        now = datetime.datetime.now(datetime.UTC)
        options.output = Path(f"pallas_kernels_bench/{now:%Y-%m-%d_%H%M%S}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0 if every implementation is right and nothing is left."""
    options = parse(arguments)
    start = time.monotonic()
    if options.rehearse:
        os.environ["JAX_PLATFORMS"] = "cpu"
    given = {
        "sizes": [2**exponent for exponent in options.sizes or ()],
        "ops": list(options.ops),
        "samples": options.samples,
        "minutes": options.minutes,
        "rehearse": options.rehearse,
        "tune": options.tune,
    }
    record = Record(options.output)
    command = ["python", "-m", "pallas_kernels.bench"]
    try:
        device = ask_for_device()
        record.begin(given, device, [*command, *(sys.argv[1:] if arguments is None else arguments)])
    except (OSError, RuntimeError, ValueError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    print(f"{device['devices']}; record in {options.output}\n{HEAD}", flush=True)
    chosen = TUNED_PARTS if options.tune else PARTS
    all_done = parts.run(chosen, record, 60 * options.minutes, given)
    if all_done:
        record.finish()
    measurements = read(record.results(TIMES))
    rows = [row for row in ROWS if row.op.split(".")[0] in options.ops]
    print("\nGoals on an H200, from 2**26 coordinates on:")
    for line in verdicts(rows, measurements, "H200" in device["kind"]):
        print(line)
    if options.tune:
        file = options.output / MEASURED
        found = measured_rows(measurements, device["kind"], options.output.name)
        _measurements.write(file, found)
        print(f"\n{len(found)} rows in {file}. To use them: {_measurements.VARIABLE}={file}")
    bad = parts.bad_lines(record, chosen)
    left = "" if all_done else f" Something is left: the same with --output {options.output}."
    seconds = time.monotonic() - start
    print(f"\n{len(measurements)} times, {len(bad)} failures, {seconds:.0f} s.{left}")
    return 0 if all_done and not bad else 1


if __name__ == "__main__":
    sys.exit(main())
