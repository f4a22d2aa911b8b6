"""Which laws hold which methods is data: whoever removes a pair shows it in the diff."""

import csv
import pathlib
import subprocess
import sys

import pytest

from tests.cases.weaker import COLUMNS, Data, committed, read, weaker


def test_the_data_is_that_of_the_tests(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "tests.cases.pairs", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    found = {name: (tmp_path / name).read_text(encoding="utf-8") for name in COLUMNS}
    names = [*csv.reader((tmp_path / "names.csv").read_text(encoding="utf-8").splitlines())][1:]
    assert len(names) > 90 and [name for name, laws in names if laws == "0"] == []
    changed = [name for name in COLUMNS if found[name] != committed(name)]
    lost = weaker(read(committed), read(found.__getitem__))
    advice = ["Run `python -m tests.cases.pairs`. Weaker than before:", *lost]
    assert not changed, "\n".join(advice)


BEFORE: Data = {
    "pairs.csv": [
        ("law", "one", "3 8", "2", "1"),
        ("law", "two", "4", "1", "1"),
        ("other", "one", "", "1", "0"),
    ],
    "laws.csv": [
        ("law", "> #", "0.05"),
        ("law", "assert_array_equal", ""),
        ("law", "atol #", "1e-06 1e-05"),
        ("law", "bound = 2 * # * peak", "1e-06"),
        ("law", "draws #", "4000"),
    ],
    "claims.csv": [
        ("table", "one", "contraction", "0.2 0.1"),
        ("table", "one", "unbiased", "1"),
        ("table", "one", "variance", "0.1 0.2"),
    ],
}
CHANGES = [
    ("pairs.csv", ("law", "two"), None, "law of two is lost"),
    ("pairs.csv", ("law", "one"), ("3", "2", "1"), "law of one is lost for 8 workers"),
    ("laws.csv", ("law", "> #"), ("0.04",), "law has `> #` of 0.04 after 0.05"),
    ("laws.csv", ("law", "assert_array_equal"), None, "law has no `assert_array_equal`"),
    ("laws.csv", ("law", "atol #"), ("1e-06 2e-05",), "of 1e-06 2e-05 after 1e-06 1e-05"),
    ("laws.csv", ("law", "atol #"), ("1e-05",), "of 1e-05 after 1e-06 1e-05"),
    ("laws.csv", ("law", "bound = 2 * # * peak"), None, "has no `bound = 2 * # * peak` of 1e-06"),
    ("laws.csv", ("law", "draws #"), ("3000",), "of 3000 after 4000"),
    ("laws.csv", ("law", "rtol #"), ("1e-05",), "law has `rtol #` of 1e-05 and had none"),
    ("claims.csv", ("table", "one", "contraction"), ("0.2 0.05",), "of 0.2 0.05 after 0.2 0.1"),
    ("claims.csv", ("table", "one", "unbiased"), ("0",), "claims `unbiased` of 0 after 1"),
    ("claims.csv", ("table", "one", "variance"), ("0.1 0.3",), "of 0.1 0.3 after 0.1 0.2"),
    ("claims.csv", ("table", "one", "variance"), None, "does not claim `variance` of 0.1 0.2"),
    # What is tighter, or more.
    ("pairs.csv", ("law", "two"), ("4 8", "2", "1"), ""),
    ("pairs.csv", ("law", "three"), ("4", "1", "1"), ""),
    ("laws.csv", ("law", "atol #"), ("1e-06",), ""),
    ("laws.csv", ("law", "> #"), ("0.06",), ""),
    ("laws.csv", ("new", "rtol #"), ("0.1",), ""),
    ("claims.csv", ("table", "one", "variance"), ("0.1 0.1",), ""),
]


@pytest.mark.parametrize(("file", "key", "changed", "message"), CHANGES)
def test_what_is_weaker(
    file: str, key: tuple[str, ...], changed: tuple[str, ...] | None, message: str
) -> None:
    others = [line for line in BEFORE[file] if line[: len(key)] != key]
    found = weaker(BEFORE, {**BEFORE, file: [*others, *([(*key, *changed)] if changed else [])]})
    assert len(found) == bool(message) and all(message in each for each in found)


def test_a_lost_law_is_told_by_its_pairs() -> None:
    after = {name: [x for x in lines if x[0] != "law"] for name, lines in BEFORE.items()}
    assert weaker(BEFORE, after) == ["law of one is lost", "law of two is lost"]
