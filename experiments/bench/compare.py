"""Regressions since a record, above noise.

- Multiples of the baseline, the minimum of a run over the minimum of the baseline: a regression is
  an increase by more than 10 %, and by more than the increase of either run's multiple without the
  best repeat of the method and of the baseline. Nanoseconds are not compared: the speed of a
  machine changes by the hour, and that of the baseline with it.
- Core seconds to compile: an increase by more than half, and by more than one second.
- Counts in the compiled program have no noise: any increase.
"""

from collections.abc import Iterator, Mapping, Sequence

from experiments.bench.record import COUNTS, Row, multiple, noise

SLOWER = 1.1
COMPILES_SLOWER, SECONDS = 1.5, 1.0


def _worse(before: Row, after: Row) -> Iterator[str]:
    limit = max(SLOWER, noise(before), noise(after))
    was, now = multiple(before), multiple(after)
    if now > limit * was:
        yield f"{now:.2f} times the baseline, {was:.2f} before (noise: {limit:.2f} times)"
    was, now = before["compile_seconds"], after["compile_seconds"]
    if now > max(COMPILES_SLOWER * was, was + SECONDS):
        yield f"{now:.1f} s of cores to compile, {was:.1f} before"
    for name, title in COUNTS.items():
        was, now = before[name], after[name]
        if now > was:
            yield f"{now:,} {title}, {was:,} before"


def regressions(before: Mapping[str, Row], after: Sequence[Row]) -> list[str]:
    """A line per regression, for the rows of both records."""
    return [
        f"{row['name']}: {worse} ({before[row['name']]['commit'][:7]})"
        for row in after
        if row["name"] in before
        for worse in _worse(before[row["name"]], row)
    ]


def verdict(before: Mapping[str, Row], after: Sequence[Row]) -> list[str]:
    """The lines that report the comparison."""
    shared = [row["name"] for row in after if row["name"] in before]
    commits = sorted({before[name]["commit"][:7] for name in shared})
    if not shared:
        return ["No record with this machine, JAX and sizes has these rows: nothing is compared."]
    lines = regressions(before, after)
    result = f"{len(lines)} REGRESSIONS" if lines else "no regression"
    return [f"{len(shared)} rows compared with {', '.join(commits)}: {result} above noise.", *lines]
