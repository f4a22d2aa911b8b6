"""`python -m experiments.gpu`: all that ten minutes with a GPU can show, most valuable first.

| part | seconds | what it measures |
|---|---|---|
| right | 60 | whether ops equal their references, bit for bit where that is promised |
| times | 180 | each op beside XLA's fusion, a copy and PyTorch, at 2**28 and 2**24 coordinates |
| codecs | 90 | encoding and decoding the gradients of two models; writes `calibration.json` |
| step | 120 | the share of a training step that encoding and decoding take |
| power_sgd | 90 | `power_sgd` beside PyTorch's `powerSGD_hook` |
| tests | the rest | `tests/gpu`, unless `--most` is given |

A record that exists is continued: what has a result is not measured again. Time that a part does
not need goes to parts that are unfinished.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pallas_kernels.benchmark import ops, parts
from pallas_kernels.benchmark.parts import Part
from pallas_kernels.benchmark.record import Record, ask_for_device

ROOT = Path(__file__).parents[2]
MEASURE = "experiments.gpu.measure"
PARTS = (
    *ops.PARTS,
    Part("codecs", MEASURE, 90),
    Part("step", MEASURE, 120),
    Part("power_sgd", MEASURE, 90),
)
TESTS = "tests"
NAMES = (*(part.name for part in PARTS), TESTS)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="tools/gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("parts", nargs="*", choices=NAMES, metavar="PART", help=f"of {NAMES}; all by default")
    add("--record", type=Path, metavar="FOLDER", help="default: experiments/records/gpu")
    add("--minutes", type=float, default=10.0, metavar="M", help="the time for everything")
    add("--most", type=int, metavar="N", help="only the first N measurements of each part")
    add("--again", action="store_true", help="measure again what failed or was skipped")
    add("--rehearse", action="store_true", help="on a CPU, small, kernels in the interpreter")
    options = parser.parse_args(arguments)
    default = "build/gpu_rehearsal" if options.rehearse else "experiments/records/gpu"
    options.record = options.record or ROOT / default
    return options


def _tests(record: Record, seconds: float) -> bool:
    """Runs tests/gpu, unless they have passed; returns whether they have."""
    if {"kind": "tests", "code": 0} in record.results([TESTS]):
        return True
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-W", "default", "-rfEs", "-q"]
    try:
        code = subprocess.run(command, cwd=ROOT, timeout=seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        print("tests: the time is over", flush=True)
        return False
    results = [{"kind": "tests", "code": code}]
    record.add({"kind": "done", "part": TESTS, "key": TESTS, "results": results})
    return code == 0


def main(arguments: Sequence[str]) -> int:
    """Runs the parts; returns 0 if nothing is left, failed or wrong."""
    options, start = parse(arguments), time.monotonic()
    if options.rehearse:
        os.environ |= {"JAX_PLATFORMS": "cpu", "JAXCOMM_REHEARSE": "1"}
    given = {"rehearse": options.rehearse, "most": options.most}
    record, seconds = Record(options.record), 60 * options.minutes
    try:
        device = ask_for_device()
        record.begin(given, device, ["tools/gpu", *arguments])
    except (OSError, RuntimeError, ValueError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    if options.again:
        record.add({"kind": "again"})
    print(f"{device['devices']}; record in {options.record}", flush=True)
    chosen = [part for part in PARTS if part.name in (options.parts or NAMES)]
    all_done = parts.run(chosen, record, seconds, given)
    if record.results(["codecs"]):
        from experiments.gpu import measure  # Only now: no other process needs the device.

        measure.calibration(record).save(record.folder / measure.CALIBRATION)
    everything = not (options.parts or options.most)
    if everything or TESTS in options.parts:
        all_done &= _tests(record, max(seconds - (time.monotonic() - start), 1))
    bad = parts.bad_lines(record, PARTS)
    for one in bad:
        reason = one.get("reason") or one.get("wrong")
        print(f"{one['kind']}: {one.get('key') or one.get('label', '')}: {reason}")
    if all_done and everything:
        record.finish()
    left = "" if all_done else " Something is left: run the same command again."
    taken = f"{time.monotonic() - start:.0f} s"
    print(f"\n{len(bad)} failures, {taken}.{left} Next: python -m experiments.gpu.pages")
    return 0 if all_done and not bad else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
