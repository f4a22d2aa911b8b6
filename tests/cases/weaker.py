"""What tests no longer check as strictly as in a revision: `python -m tests.cases.weaker REVISION`.

It compares the files that `tests.cases.pairs` writes.
"""

import csv
import itertools
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator

from tests.cases._tolerances import AT_MOST, is_lower

HERE = pathlib.Path(__file__).parent
COLUMNS = {
    "pairs.csv": ("law", "method", "workers", "tests", "quick"),
    "laws.csv": ("law", "bound", "numbers"),
    "claims.csv": ("table", "method", "claim", "numbers"),
}
# Claims of which a larger number is the tighter one; a switch that is on is 1.
LARGER_IS_TIGHTER = {
    *("contraction", "extremes", "unbiased", "integer_sum", "weighted", "feedback", "discount"),
    *("settles", "staged", "nonfinite", "absence", "aggregates", "agree", "keeps", "exact"),
    "share_of_copy",
}
Data = dict[str, list[tuple[str, ...]]]  # The lines of each file.


def read(text_of: Callable[[str], str]) -> Data:
    """The data in files, from their names' texts."""
    found = {name: [*map(tuple, csv.reader(text_of(name).splitlines()))] for name in COLUMNS}
    return {name: lines[1:] for name, lines in found.items()}


def _looser(before: str, after: str, larger_is_tighter: bool) -> bool:
    """Whether a number is; if there are fewer in one of them, its loosest stands for the others."""
    sign = -1 if larger_is_tighter else 1
    was, now = (sorted(sign * float(x) for x in text.split()) for text in (before, after))
    both = itertools.zip_longest(was, now)
    return any((was[-1] if x is None else x) < (now[-1] if y is None else y) for x, y in both)


def _pairs(before: Data, after: Data) -> Iterator[str]:
    now = {line[:2]: {*line[2].split()} for line in after["pairs.csv"]}
    for law, method, workers, *_ in before["pairs.csv"]:
        lost = {*workers.split()} - now.get((law, method), set())
        if (law, method) not in now:
            yield f"{law} of {method} is lost"
        elif lost:
            yield f"{law} of {method} is lost for {' '.join(sorted(lost, key=int))} workers"


def _laws(before: Data, after: Data) -> Iterator[str]:
    left = {line[0] for line in before["pairs.csv"]} & {line[0] for line in after["pairs.csv"]}
    now = {(law, bound): numbers for law, bound, numbers in after["laws.csv"]}
    was = {(law, bound.split()[0]) for law, bound, _ in before["laws.csv"]}
    for law, bound, numbers in before["laws.csv"]:
        if law in left and (law, bound) not in now:
            yield f"{law} has no `{bound}` of {numbers}"
        elif law in left and _looser(numbers, now[law, bound], is_lower(bound)):
            yield f"{law} has `{bound}` of {now[law, bound]} after {numbers}"
    for (law, bound), numbers in now.items():
        if law in left and bound.split()[0] in AT_MOST and (law, bound.split()[0]) not in was:
            yield f"{law} has `{bound}` of {numbers} and had none"


def _claims(before: Data, after: Data) -> Iterator[str]:
    now = {line[:3]: line[3] for line in after["claims.csv"]}
    left = {line[:2] for line in now}
    for table, method, claim, numbers in before["claims.csv"]:
        given = now.get((table, method, claim))
        if (table, method) in left and given is None:
            yield f"{method} of {table} does not claim `{claim}` of {numbers}"
        elif given is not None and _looser(numbers, given, claim in LARGER_IS_TIGHTER):
            yield f"{method} of {table} claims `{claim}` of {given} after {numbers}"


def weaker(before: Data, after: Data) -> list[str]:
    """Pairs and numbers of workers that are lost, and tolerances and claims that are looser."""
    return [*_pairs(before, after), *_laws(before, after), *_claims(before, after)]


def _in_revision(name: str) -> str:
    command = ["git", "show", f"{sys.argv[1]}:./{name}"]
    return subprocess.run(command, cwd=HERE, check=True, capture_output=True, text=True).stdout


def committed(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.exit("\n".join(weaker(read(_in_revision), read(committed))) or None)
