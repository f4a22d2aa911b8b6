"""The cost of every method in one table, regressions, and tables of codecs and kernels."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import optax

from experiments.bench import dither, ops
from experiments.bench import memory as bench_memory
from experiments.bench import record as bench_record
from experiments.bench import sparse as bench_sparse
from experiments.bench import windows as bench_windows
from experiments.bench.compare import verdict
from experiments.bench.methods import PER_WORKER, QUICK, ROWS, TIMED, WORKERS, select_families
from experiments.bench.programs import compile_step, transformer
from experiments.bench.record import BenchRecord, Row
from experiments.bench.table import to_family_table, to_table, write_readme
from experiments.bench.timing import time_in_subprocess
from experiments.bench.updates import LAYERS
from experiments.cli.configs import Bench
from experiments.cli.progress import Progress
from experiments.study.record import open_record
from experiments.training.train import make_mesh

NEWEST = "newest"


def _nanoseconds(
    families: Mapping[str, str], config: Bench, progress: Progress
) -> dict[str, tuple[list[float], list[float]]]:
    """Nanoseconds of each timed row, and of the baseline in the same rounds."""
    timed = [name for name in families if name in TIMED]
    timings: dict[str, tuple[list[float], list[float]]] = {}
    for group in time_in_subprocess(timed, config.side, config.repeats) if timed else ():
        baseline = group["baseline"]
        timings |= {
            name: (nanoseconds, baseline)
            for name, nanoseconds in group.items()
            if name != "baseline"
        }
        progress.advance(len(timings), f"timed {', '.join(name for name in group)}")
    return timings


def measure_rows(
    families: Mapping[str, str], config: Bench, params: Any, commit: str, progress: Progress
) -> Iterator[Row]:
    """Times the rows that one worker can run, then compiles all rows in turn."""
    timings, mesh = _nanoseconds(families, config, progress), make_mesh(WORKERS)
    for done, (name, family) in enumerate(families.items(), 1):
        tx, per_worker = ROWS[name].build(), name in PER_WORKER
        transformation = tx if per_worker else optax.chain(tx, optax.sgd(0.1))
        program = compile_step(transformation, params, mesh, per_worker)
        nanoseconds, baseline = timings.get(name, ([], []))
        seconds = program.compile_seconds
        progress.advance(len(timings) + done, f"compiled {name} in {seconds:.1f} s")
        yield {
            "kind": "bench_row",
            "family": family,
            "name": name,
            "nanoseconds": nanoseconds,
            "baseline": baseline,
            "compile_seconds": seconds,
            **{count: getattr(program, count) for count in bench_record.COUNTS},
            "commit": commit,
        }


def measure_families(params: Any, width: int) -> Iterator[Row]:
    """Memory from the compiled programs, and for some rows the resident memory of a process."""
    for family, name in bench_memory.FAMILIES.items():
        measured = name in bench_memory.MEASURED
        resident = bench_memory.resident_in_subprocess(name, width) if measured else math.nan
        yield {
            "kind": "bench_memory",
            "family": family,
            "name": name,
            **bench_memory.compiled_memory(name, params)._asdict(),
            "resident": resident,
        }


def _print_other_tables(config: Bench, progress: Progress) -> None:
    """Prints the tables of kernels, codecs and windows."""
    size, few = config.coordinates, -(-config.repetitions // 3)
    passes = dither.time_passes(size, config.repetitions)
    progress.print(dither.to_table(passes, size))
    for line in dither.verdicts(passes):
        progress.print(line)
    for vector_bits, seconds in ops.time_quantize(size, config.repetitions).items():
        progress.print(ops.verdict(seconds, size, vector_bits))
    sketch = ops.time_sketch(config.sketch_coordinates, few)
    progress.print(ops.to_table(sketch, config.sketch_coordinates))
    sparse, top_k = bench_sparse.time_sparse(size, config.repetitions)
    for line in bench_sparse.verdicts(sparse, top_k):
        progress.print(line)
    progress.print(bench_sparse.to_table(sparse, top_k, size))
    windows = {
        workers: bench_windows.time_windows(workers, config.windows)
        for workers in bench_windows.WORKERS
    }
    progress.print(bench_windows.to_table(windows, config.windows))
    progress.print(bench_windows.verdict(windows, config.windows))


def main(config: Bench) -> int:
    """Runs `python -m experiments bench`; returns the exit code."""
    families = select_families(QUICK if config.quick else config.only)
    all_tables = not config.quick and config.only == ("all",)
    params = transformer(config.width)
    size = sum(x.size for x in params.values())
    header = bench_record.make_header(LAYERS * (config.side**2 + config.side), size)
    before = (
        bench_record.newest_rows(Path(config.records), header)
        if config.against == NEWEST
        else {row["name"]: row for row in bench_record.read(Path(config.against)).rows}
    )
    with (
        open_record(config) as record,
        Progress(len(families) + len({*families} & {*TIMED})) as progress,
    ):
        progress.print(f"JAX {header['jax']}; {header['machine']}; commit {header['commit']}")
        record.add(header)
        rows, memory = [], []
        for row in measure_rows(families, config, params, header["commit"], progress):
            record.add(row)
            rows.append(row)
        for family in measure_families(params, config.width) if all_tables else ():
            record.add(family)
            memory.append(family)
        record.write("README.md", write_readme(BenchRecord(header, rows, memory)))
        record.finish()
        progress.print(to_table(rows, size))
        if memory:
            progress.print(to_family_table(memory))
        for line in verdict(before, rows):
            progress.print(line)
        if record.folder:
            progress.print(f"Record: {record.folder}")
        if all_tables:
            _print_other_tables(config, progress)
    return 0
