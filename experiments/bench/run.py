"""The cost of every method in one table, regressions, and tables of codecs and kernels."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.bench import kernels
from experiments.bench.programs import (
    OF_FAMILIES,
    compile_step,
    transformer,
)
from experiments.bench.record import (
    HEADINGS_OF_METHODS,
    BenchRecord,
    Row,
    aligned,
    by_name,
    make_header,
    method_cells,
    newest_rows,
    read,
    verdict,
    write_readme,
)
from experiments.bench.updates import (
    FAMILY,
    GOALS,
    LAYERS,
    PER_WORKER,
    ROWS,
    time_in_subprocess,
)
from experiments.errors import select
from experiments.study.record import new_record
from experiments.study.run import Command

WORKERS = 8
QUICK = (
    "mean",
    "global_qsgd_8_bits",
    "qsgd",
    "two_stage_4_bits",
    "ef_sign_sgd",
    "top_k_sgd",
    "random_k_feedback",
    "s2_reducer",
    "diana",
    "local_sgd",
    "dpsgd",
)
"""Rows that cover each way of exchanging updates and keeping memory."""


@dataclasses.dataclass(frozen=True)
class Bench:
    """What does each method cost on a core, in memory and in the compiler?

    Question: how many nanoseconds per coordinate does the whole update of each method take on one
    core, and which multiple of a baseline, the simplest compression, is that? How many bytes does
    its compiled step access and hold, and how many collectives has it? Which of these numbers
    became worse since the last record of this machine? The other tables compare 8-bit dithering
    with one fused line of jnp, codecs of sparse updates with `jax.lax.top_k`, and `pallas_kernels`
    on a CPU with plain scatters.

    Command: `python -m experiments bench`, or `make bench`.

    Expected time: 25 minutes on two idle CPU cores; two minutes with --quick.

    Number: multiples of the baseline, at most the goals in the table; the time of dithering over
    that of plain code, at most 2; nanoseconds of one core to quantize, at most 1.5 per coordinate.
    S2 Reducer takes at most 30 ms each to encode and to decode with the mean, and less than `top_k`
    in total with peeling.
    """

    only: tuple[str, ...] = ("all",)
    """rows or families of the first table to measure, or goals; omits the other tables"""
    quick: bool = False
    """measures a few rows of the first table; omits the other tables"""
    against: str = "newest"
    """record folder to compare with; newest: per row, the newest record of this machine and JAX"""
    repeats: int = 3
    """timings of the updates, each of two rounds"""
    side: int = 1024
    """width of the ten square layers of the timed updates"""
    width: int = 1024
    """width of the transformer whose step is compiled"""
    record: str = "bench"
    """the record folder is <date>_NAME; none writes no record"""
    records: str = "runs"
    """folder in which the record folder is created"""


def select_rows(names: Sequence[str]) -> list[str]:
    """The rows of which the name, the family, `goals` or `all` is named.

    Raises:
      ExperimentError: If a name is none of these.
    """
    chosen = {*select(names, ["goals", *dict.fromkeys(FAMILY.values()), *ROWS], "--only")}
    return [
        name
        for name, family in FAMILY.items()
        if {name, family} & chosen or ("goals" in chosen and name in GOALS)
    ]


def measure_rows(names: Sequence[str], config: Bench, params: Any, commit: str) -> Iterator[Row]:
    """Times the rows that one worker can run, then compiles all rows in turn."""
    timed = [name for name in names if name not in PER_WORKER]
    times = time_in_subprocess(timed, config.side, config.repeats)
    for number, name in enumerate(names, 1):
        program = compile_step(name, params, WORKERS)
        print(f"{number} of {len(names)}: compiled {name}", flush=True)
        nanoseconds, baseline = times.get(name, ([], []))
        about = {"kind": "bench_row", "family": FAMILY[name], "name": name, "commit": commit}
        yield {**about, "nanoseconds": nanoseconds, "baseline": baseline, **program}


def measure_memory(params: Any) -> Iterator[Row]:
    """Memory from the compiled programs."""
    for name in OF_FAMILIES:
        program = compile_step(name, params, 1)
        yield {"kind": "bench_memory", "family": FAMILY[name], "name": name, **program}


def main(config: Bench) -> int:
    """Runs `python -m experiments bench`; returns the exit code."""
    names = select_rows(QUICK if config.quick else config.only)
    everything = not config.quick and config.only == ("all",)
    params = transformer(config.width)
    size = sum(x.size for x in params.values())
    header = make_header(LAYERS * (config.side**2 + config.side), size)
    before = (
        newest_rows([Path(config.records), Path("experiments/records")], header)
        if config.against == "newest"
        else by_name(read(Path(config.against)))
    )
    found = BenchRecord(header, [], [])
    with new_record(config, "bench") as record:
        record.add([header])
        for row in measure_rows(names, config, params, header["commit"]):
            record.add([row])
            found.rows.append(row)
        for row in measure_memory(params) if everything else ():
            record.add([row])
            found.families.append(row)
        record.write("README.md", write_readme(found))
        record.finish()
    print(aligned(HEADINGS_OF_METHODS, method_cells(found.rows, size), left=2))
    print(*verdict(before, found.rows), sep="\n")
    print(f"Record: {record.folder or 'none'}", flush=True)
    for table in kernels.TABLES if everything else ():
        print("", table(), sep="\n", flush=True)
    return 0


BENCH = Command(Bench, main)
