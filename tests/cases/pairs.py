"""Which laws hold which methods, and to what, as data: `python -m tests.cases.pairs`.

A law is a test with rows of methods as parameters. It writes four files beside this one:

- pairs.csv: each law with each of its methods, the numbers of workers, how many tests these are,
  and how many of them are quick;
- laws.csv: the tolerances in the code of each law, with `#` in the place of a number;
- claims.csv: what each row claims, in numbers;
- names.csv: each public name of a method, and how many laws `-k NAME` selects.
"""

import contextlib
import csv
import io
import itertools
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.cases._tolerances import bounds_of, workers_of
from tests.cases.weaker import COLUMNS, Data
from tests.test_complete import METHODS as PUBLIC
from tests.test_complete import WITHOUT_ROW

HERE = pathlib.Path(__file__).parent
# Modules with rows; a file with laws imports one.
TABLES = re.compile(
    r"tests\.(cases|synchronization\.events\.rows|laws\.test_codecs)|pallas_kernels\.arg_specs"
)
SIZES = (12, 1000)  # Coordinates for which claims are given, for 8 workers.
CLAIMS: dict[str, Callable[[Any], list[float]]] = {
    "bytes": lambda claim: [claim([d], 8) for d in SIZES],
    "dtypes": lambda claim: [max(int(re.findall(r"\d+", dtype)[0]) for dtype in claim(8))],
    "variance": lambda claim: [claim(d, 8) for d in SIZES],
    "resolution": lambda claim: [claim(8, d) for d in SIZES],
    "contraction": lambda claim: [claim(d) for d in SIZES],
    "extremes": lambda claim: [claim(d) for d in SIZES],
    "moment": lambda claim: [claim(np.random.default_rng(0).normal(size=d)) for d in SIZES],
    "alien": lambda claim: [bool(claim)],
    "nonfinite": lambda claim: [claim == "all"],
}


class _Collection:
    """Collects the files of laws."""

    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    def pytest_ignore_collect(self, collection_path: pathlib.Path) -> bool | None:
        is_file = collection_path.suffix == ".py"
        return (is_file and not TABLES.search(collection_path.read_text("utf-8"))) or None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = session.items


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _rows(item: pytest.Item) -> list[Any]:
    return [x for x in _parameters(item).values() if TABLES.match(type(x).__module__)]


def _name(row: Any) -> str:
    """Of a line of the page of methods, the row; of a kernel, the label."""
    return next(getattr(row, x) for x in ("name", "row", "label") if hasattr(row, x))


def _strings(items: list[pytest.Item], known: set[str]) -> list[set[str]]:
    """Names of rows that tests of a law have in place of them; none if one is of something else."""
    given = [_parameters(item).get("method", _parameters(item).get("name")) for item in items]
    are_names = all(isinstance(x, str) and x in known for x in given)
    return [{x} if are_names else set() for x in given]


def _table(row: Any) -> str:
    return f"{type(row).__module__.rpartition('.')[2]}.{type(row).__name__}"


def _text(numbers: Iterable[float]) -> str:
    return " ".join(f"{float(number):.10g}" for number in numbers)


def _claims(row: Any) -> dict[str, list[float]]:
    found = {}
    for name, claim in row._asdict().items() if not hasattr(row, "row") else ():
        if name in CLAIMS and callable(claim) | isinstance(claim, str | tuple):
            found[name] = CLAIMS[name](claim)
        elif isinstance(claim, int | float) and name not in ("variant", "slow"):
            found[name] = [claim]
    return found


def _names(items: list[pytest.Item]) -> Iterator[tuple[str, str]]:
    laws = [item for item in items if item.nodeid.startswith("tests/laws/")]
    texts = {
        (item.nodeid.split("[")[0], " ".join([item.name, *sorted(item.extra_keyword_matches)]))
        for item in laws
    }
    for name in sorted({method.__name__ for method in PUBLIC.values()} - {*WITHOUT_ROW}):
        yield name, str(len({law for law, text in texts if name in text}))


def collected() -> Data:
    """What the tests hold their rows to now."""
    collection = _Collection()
    arguments = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-m", ""]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = pytest.main([*arguments, str(HERE.parents[1] / "tests")], [collection])
    if status:
        sys.exit(said.getvalue())
    rows = {(_table(row), _name(row)): row for item in collection.items for row in _rows(item)}
    known = {name for _, name in rows}
    pairs: dict[tuple[str, str], list[pytest.Item]] = {}
    for law, group in itertools.groupby(collection.items, lambda item: item.nodeid.split("[")[0]):
        items = [*group]
        for item, names in zip(items, _strings(items, known), strict=True):
            for name in names.union(map(_name, _rows(item))):
                pairs.setdefault((law, name), []).append(item)
    given = {law: items[0].function for (law, _), items in pairs.items()}
    laws = {name: getattr(function, "law", function) for name, function in given.items()}
    constant = {law: workers_of(function) for law, function in laws.items()}

    def line(law: str, method: str) -> tuple[str, ...]:
        items = pairs[law, method]
        given = {_parameters(item).get("workers") for item in items}
        workers = {x for x in given if isinstance(x, int)} or constant[law]
        quick = sum(item.get_closest_marker("slow") is None for item in items)
        return law, method, _text(sorted(workers)), str(len(items)), str(quick)

    return {
        "names.csv": [*_names(collection.items)],
        "pairs.csv": sorted(line(*pair) for pair in pairs),
        "laws.csv": sorted(
            (law, bound, _text(sorted(numbers)))
            for law, function in laws.items()
            for bound, numbers in bounds_of(function).items()
        ),
        "claims.csv": sorted(
            (*row, claim, _text(numbers))
            for row, claims in rows.items()
            for claim, numbers in _claims(claims).items()
        ),
    }


def write(data: Data, folder: pathlib.Path) -> None:
    for name, columns in {**COLUMNS, "names.csv": ("name", "laws")}.items():
        with open(folder / name, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([columns, *data[name]])


if __name__ == "__main__":
    write(collected(), pathlib.Path(sys.argv[1]) if sys.argv[1:] else HERE)
