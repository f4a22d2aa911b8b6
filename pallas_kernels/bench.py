"""`python -m pallas_kernels.bench`: the time of every op, compared with a copy, XLA and PyTorch.

The benchmark queues many calls on the device and waits for the last; it reports seconds per call.
From about 2**22 coordinates on this is time on the device. Below, it is mostly the time in which
the host starts a call, equally for every implementation. All calls read the same arrays, so arrays
smaller than the device's cache (50 MB on an H200) stay in the cache. On a CPU the benchmark waits
for every call.

Bytes are those that the op has to move: its arguments and results once; for encoding a sketch, x
once for each row. "of a copy" is the op's bytes per second divided by those of `x + 1` on float32
of the same size, timed in turn with it. PyTorch's column times `torch_equivalents`.
"""

import argparse
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

# Leaves memory to PyTorch in the same process. JAX reads this at the first use of a device.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch
from pallas_kernels._dispatch import Implementation
from pallas_kernels.arg_specs import ROWS, Row
from pallas_kernels.benchmark import torch_equivalents
from pallas_kernels.benchmark.goals import Measurement, verdicts
from pallas_kernels.benchmark.record import Record
from pallas_kernels.benchmark.timing import Candidate, time_in_turn

OPS = tuple(dict.fromkeys(row.op.split(".")[0] for row in ROWS))
SIZES = {"cpu": (16, 20), "other": (16, 18, 20, 22, 24, 26, 28)}
SAMPLES = {"cpu": 5, "other": 20}
LINE = "{:<36} {:>13} {:<11} {:>12} {:>8} {:>9} {:>10}"


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
    add("--output", type=Path, metavar="DIR", help="a new folder for the record")
    options = parser.parse_args(arguments)
    for exponent in options.sizes or ():
        if not 0 <= exponent <= 31:
            parser.error(f"argument --sizes: must be in 0 to 31, got {exponent}")
    if options.samples is not None and options.samples < 1:
        parser.error(f"argument --samples: must be at least 1, got {options.samples}")
    if options.output is not None and options.output.exists():
        parser.error(f"argument --output: {options.output} already exists")
    return options


def candidates(row: Row, size: int, device: _dispatch.Device, torch: Any) -> dict[str, Candidate]:
    """A copy, and every implementation of `row` that runs on `device`."""

    def compiled(f: Any, arguments: Any) -> Candidate:
        return Candidate(functools.partial(jax.jit(f), *arguments), jax.block_until_ready)

    arguments = jax.block_until_ready(jax.jit(lambda: row.arguments(size))())
    found = {"copy": compiled(lambda x: x + 1, [jnp.zeros(size, jnp.float32)])}
    implementations: tuple[Implementation, ...] = ("reference", *row.kernels)
    for implementation in implementations:
        if _dispatch.reason_against(implementation, device) is None:
            found[implementation] = compiled(row.function(size, implementation), arguments)
    if torch is not None and row.label in torch_equivalents.EQUIVALENTS:
        call = torch_equivalents.EQUIVALENTS[row.label](torch, size)
        found["torch"] = Candidate(call, lambda _: torch.cuda.synchronize())
    return found


def measure(
    row: Row, size: int, samples: int, device: _dispatch.Device, torch: Any, record: Record
) -> list[Measurement]:
    """Times one row at one size, records the samples and prints a line for each implementation."""
    times = time_in_turn(
        candidates(row, size, device, torch), samples, queue=device.platform != "cpu"
    )
    bandwidth = 8 * size / times["copy"].median
    measurements = []
    for implementation, timing in times.items():
        moved = 8 * size if implementation == "copy" else row.traffic(size)
        share = moved / timing.median / bandwidth
        print(
            LINE.format(
                row.label,
                f"{size:,}",
                implementation,
                f"{1e6 * timing.median:,.1f}",
                f"{100 * timing.spread:.0f} %",
                f"{moved / timing.median / 1e9:,.1f}",
                f"{100 * share:.0f} %",
            ),
            flush=True,
        )
        record.add(
            {
                "kind": "time",
                "op": row.op,
                "label": row.label,
                "size": size,
                "implementation": implementation,
                "bytes": moved,
                "calls": timing.calls,
                "seconds": timing.seconds,
            }
        )
        measurements.append(Measurement(row, size, implementation, timing.median, share))
    return measurements


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark with the options of the command line; returns the exit code."""
    options = parse(arguments)
    device = _dispatch.target()
    kind = "cpu" if device.platform == "cpu" else "other"
    sizes = [2**exponent for exponent in options.sizes or SIZES[kind]]
    samples = options.samples or SAMPLES[kind]
    torch = torch_equivalents.load() if device.platform == "cuda" else None
    config = {"sizes": sizes, "ops": list(options.ops), "samples": samples, "seeds": "fixed"}
    try:
        command_line = list(sys.argv[1:] if arguments is None else arguments)
        record = Record(options.output, config, command_line)
    except OSError as error:
        print(f"cannot create {options.output}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"JAX {jax.__version__}, {device.kind}, PyTorch {torch and torch.__version__}")
    print(LINE.format("op", "coordinates", "", "microseconds", "spread", "GB/s", "of a copy"))
    rows = [row for row in ROWS if row.op.split(".")[0] in options.ops]
    measurements = []
    for size in sizes:
        for row in rows:
            measurements += measure(row, size, samples, device, torch, record)
    print("\nGoals on an H200, from 2**26 coordinates on:")
    for line in verdicts(rows, measurements, "H200" in device.kind):
        print(line)
    record.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
