"""The parts that check and time ops: `python -m pallas_kernels.benchmark.ops PART ...`."""

import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

# Leaves memory to PyTorch in the same process. JAX reads this at the first use of a device.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from pallas_kernels.arg_specs import ROWS, Row
from pallas_kernels.benchmark import torch_equivalents
from pallas_kernels.benchmark.candidates import (
    Session,
    Variant,
    builders,
    check,
    torch_builders,
    variants,
)
from pallas_kernels.benchmark.parts import Part, Result, Task, child, reason_of, size_class
from pallas_kernels.benchmark.record import Record, gpu_state
from pallas_kernels.benchmark.timing import Candidate, profile, time_in_turn

LINE = "{:<38} {:>13} {:<11} {:>12} {:>8} {:>11} {:>9} {:>10}  {}"
HEAD = LINE.format(
    "op", "coordinates", "", "microseconds", "spread", "on device", "GB/s", "of a copy", ""
)

# What users run by default is measured first.
FIRST = (
    "quantize float32, 8 bits",
    "dequantize, 8 bits",
    "quantize float32, 4 bits",
    "dequantize, 4 bits",
    "pack, 4 bits",
    "unpack, 4 bits",
    "block float float8_e4m3fn, blocks of 32",
    "block float int8, blocks of 256",
    "exponential encode",
    "exponential add",
    "sketch tiles, encode float32",
    "sketch tiles, decode median",
    "sketch tiles, decode mean",
)
IN_ORDER: tuple[Row, ...] = tuple(
    sorted(ROWS, key=lambda row: FIRST.index(row.label) if row.label in FIRST else len(FIRST))
)
OPS = tuple(dict.fromkeys(row.op.split(".")[0] for row in IN_ORDER))

PADDED = 77  # Coordinates beyond a power of two, so that every kernel has to pad.
SIZES = {"cpu": (2**16, 2**20), "other": (2**28, 2**24, 2**18), "rehearsal": (2**11,)}
TUNED_SIZES = {"cpu": (2**20,), "other": (2**26, 2**22, 2**18), "rehearsal": (2**11,)}
CHECK_SIZES = {
    "cpu": (3001, 1),
    "other": (2**20 + PADDED, 1001, 2**20, 1),
    "rehearsal": (2**10 + PADDED,),
}

PARTS = (
    Part("right", "pallas_kernels.benchmark.ops", 60),
    Part("times", "pallas_kernels.benchmark.ops", 180),
)
TUNED_PARTS = (
    Part("tune_right", "pallas_kernels.benchmark.ops", 400),
    Part("tune_times", "pallas_kernels.benchmark.ops", 600),
)
TIMES = ("times", "tune_times")


def _about(row: Row, size: int, variant: Variant) -> dict[str, Any]:
    """What was called, as the lines of a record have it."""
    called = {"label": row.label, "size": size, "implementation": variant.name}
    return called | {"config": dict(variant.config)}


def _limit(session: Session) -> float:
    """Seconds of one measurement: a kernel that takes longer on a GPU hangs."""
    return 30 if session.queue else 600


def _rows(options: Mapping[str, Any]) -> Iterator[Row]:
    ops = options.get("ops") or OPS
    return (row for row in IN_ORDER if row.op.split(".")[0] in ops)


def _sizes(session: Session, options: Mapping[str, Any], name: str, defaults: Any) -> Any:
    return options.get(name) or defaults[size_class(session.device.platform, session.rehearse)]


def check_one(row: Row, size: int, variant: Variant, session: Session) -> list[Result]:
    """Compares a variant with the reference on the CPU."""
    reason = check(row, size, variant, session)
    what = f"{row.label:<38} {size:>13,} {variant.name:<11} {variant.described}".rstrip()
    print(f"{what} {'WRONG: ' + reason if reason else 'right'}", flush=True)
    return [{"kind": "check", **_about(row, size, variant), "exact": row.exact, "wrong": reason}]


def checks(session: Session, options: Mapping[str, Any], record: Record) -> Iterator[Task]:
    """A task for each size, op and variant."""
    for size in _sizes(session, options, "check_sizes", CHECK_SIZES):
        for row in _rows(options):
            for variant in variants(row, session):
                run = functools.partial(check_one, row, size, variant, session)
                yield Task(_about(row, size, variant), run, _limit(session))


def time_row(
    row: Row,
    size: int,
    builds: Mapping[Variant, Callable[[], Candidate]],
    session: Session,
) -> list[Result]:
    """Times what runs, in turn; a result for each."""
    candidates: dict[Variant, Candidate] = {}
    results: list[Result] = []

    def failed(variant: Variant, error: Exception) -> None:
        reason = reason_of(error)
        print(f"{row.label:<38} {size:>13,} {variant.name} FAILED: {reason}", flush=True)
        results.append({"kind": "failed", **_about(row, size, variant), "reason": reason})

    for variant, build in builds.items():
        try:
            candidate = build()
            candidate.wait(candidate.call())
            candidates[variant] = candidate
        except Exception as error:
            failed(variant, error)
    if not candidates:
        return results
    times = time_in_turn(candidates, session.samples, queue=session.queue)
    copy = times.get(Variant("copy"))
    for variant, timing in times.items():
        seconds, peak = None, None
        if variant.name != "torch":  # JAX's profiler sees JAX's calls.
            try:
                seconds, peak = profile(candidates[variant], min(timing.calls, 20))
            except Exception as error:
                failed(Variant(f"profiler of {variant.name}"), error)
        moved = 8 * size if variant.name == "copy" else row.traffic(size)
        share = moved / timing.median / (8 * size / copy.median) if copy and size else None
        line = LINE.format(
            row.label,
            f"{size:,}",
            variant.name,
            f"{1e6 * timing.median:,.1f}",
            f"{100 * timing.spread:.0f} %",
            "-" if seconds is None else f"{1e6 * seconds:,.1f}",
            f"{moved / timing.median / 1e9:,.1f}",
            "-" if share is None else f"{100 * share:.0f} %",
            variant.described,
        )
        print(line.rstrip(), flush=True)
        results.append(
            {
                "kind": "time",
                **_about(row, size, variant),
                "bytes": moved,
                "calls": timing.calls,
                "seconds": timing.seconds,
                "device_seconds": seconds,
                "share_of_copy": share,
                "published_bytes_per_second": peak,
            }
        )
    return results


def _wrong(record: Record, part: str) -> set[tuple[str, str, tuple[tuple[str, int], ...]]]:
    """The variants that were wrong, or whose check ended the process."""
    return {
        (one["label"], one["implementation"], tuple(one["config"].items()))
        for one in record.results([part])
        if one["kind"] != "check" or one["wrong"]
    }


def times(session: Session, options: Mapping[str, Any], record: Record) -> Iterator[Task]:
    """A task for each op and size; then one for each of PyTorch's equivalents."""
    wrong = _wrong(record, "tune_right" if session.tune else "right")
    sizes = _sizes(session, options, "sizes", TUNED_SIZES if session.tune else SIZES)
    rows = list(_rows(options))

    def of_jax(row: Row, size: int) -> list[Result]:
        found = {
            variant: build
            for variant, build in builders(row, size, session).items()
            if (row.label, variant.name, variant.config) not in wrong
        }
        clocks = {"kind": "clocks", "size": size, **gpu_state()}
        return [*time_row(row, size, found, session), clocks]

    def of_torch(row: Row, size: int) -> list[Result]:
        torch = torch_equivalents.load(on_cpu=session.rehearse)
        if torch is None:
            return [{"kind": "absent", "reason": "PyTorch is not installed or sees no GPU"}]
        return time_row(row, size, torch_builders(row, size, torch), session)

    def both(group: list[Row], sizes: Sequence[int]) -> Iterator[Task]:
        for size, row in itertools.product(sizes, group):
            about = {"label": row.label, "size": size}
            yield Task(about, functools.partial(of_jax, row, size), _limit(session))

    # Large sizes, with what users run by default first; then PyTorch; then where calls are short.
    large, small = sizes[:2], sizes[2:]
    yield from both(rows[: len(FIRST)], large)
    yield from both(rows[len(FIRST) :], large)
    if not session.tune:
        for size, row in itertools.product(large, rows):
            # The equivalents view the array as words of fields.
            if row.label in torch_equivalents.EQUIVALENTS and size % 32 == 0:
                about = {"label": row.label, "size": size, "implementation": "torch"}
                yield Task(about, functools.partial(of_torch, row, size), 60)
    yield from both(rows, small)


TASKS: dict[str, Callable[[Session, Mapping[str, Any], Record], Iterable[Task]]] = {
    "right": checks,
    "tune_right": checks,
    "times": times,
    "tune_times": times,
}

if __name__ == "__main__":
    sys.exit(child(TASKS))
