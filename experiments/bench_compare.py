"""What became worse since a record, beyond noise.

Multiples of the baseline, each the least of a run over the baseline's least: where this run's is
more than 10 % above the record's, and more above it than either run's would be without the best
repeat of the method and of the baseline. Nanoseconds are not compared: machines are faster and
slower by the hour, and the baseline with them. Seconds of cores to compile: where they are half as
many more, and a second more. What is counted in the compiled program has no noise: wherever it is
more.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from experiments.bench_record import Row

SLOWER = 1.1
COMPILES_SLOWER, SECONDS = 1.5, 1.0
COUNTED: Mapping[str, Callable[[Row], int]] = {
    "HLO lines": lambda row: row.lines,
    "collectives": lambda row: row.collectives,
    "bytes accessed": lambda row: row.accessed,
    "bytes of temporaries": lambda row: row.temporaries,
}


def _worse(before: Row, after: Row) -> Iterator[str]:
    noise = max(SLOWER, before.noise, after.noise)
    if after.multiple > noise * before.multiple:
        yield (
            f"{after.multiple:.2f} times the baseline, {before.multiple:.2f} before "
            f"(noise: {noise:.2f} times)"
        )
    was, now = before.compile_seconds, after.compile_seconds
    if now > max(COMPILES_SLOWER * was, was + SECONDS):
        yield f"{now:.1f} s of cores to compile, {was:.1f} before"
    for what, count in COUNTED.items():
        if count(after) > count(before):
            yield f"{count(after):,} {what}, {count(before):,} before"


def regressions(before: Mapping[str, Row], after: Sequence[Row]) -> list[str]:
    """A line each, of the rows that both have."""
    return [
        f"{row.name}: {worse} ({before[row.name].commit[:7]})"
        for row in after
        if row.name in before
        for worse in _worse(before[row.name], row)
    ]


def verdict(before: Mapping[str, Row], after: Sequence[Row]) -> list[str]:
    """What to print of the comparison."""
    shared = [row.name for row in after if row.name in before]
    commits = sorted({before[name].commit[:7] for name in shared})
    if not shared:
        return ["No record of this machine, JAX and sizes has these rows: nothing is compared."]
    lines = regressions(before, after)
    found = f"{len(lines)} REGRESSIONS" if lines else "no regression"
    return [f"{len(shared)} rows beside {', '.join(commits)}: {found} beyond noise.", *lines]
