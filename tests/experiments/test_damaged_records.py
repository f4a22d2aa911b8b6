"""Figures of interrupted and damaged records: a figure, or one line that says what is wrong."""

import json
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import pytest

from experiments.cli.configs import Figures
from experiments.cli.errors import ExperimentError
from experiments.study import drawing
from experiments.study.figures import main
from tests.records import committed
from tests.slow import slow

DRAWN = ["digits", "estimate", "gossip", "sparse", "survey"]
SEED = 16

# The values that select the rows of a short record, for columns that it has.
KEPT: dict[str, set[Any]] = {
    "method": {"mean", "qsgd", "truncating", "all_gather", "s2_mean_1", "dpsgd", "matcha", "sgp"},
    "graph": {"ring_8"},
    "seed": {0, 1, 5},
}
CURVES = {"step", "point"}


@cache
def lines_of(record: str) -> list[str]:
    """A few of the lines of a real record, in their order."""
    (folder,) = committed(f"*_{record}")
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    steps = sorted({row["step"] for row in rows if row["kind"] in CURVES})[::8]
    return [
        line
        for line, row in zip(lines, rows, strict=True)
        if all(row.get(column) in {None, *kept} for column, kept in KEPT.items())
        and (row["kind"] not in CURVES or row["step"] in steps)
    ]


class Drawn(Protocol):
    """Draws from a file of metrics; returns the error message, or an empty string."""

    def __call__(self, metrics: bytes, record: str = "digits") -> str: ...


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """Draws from a file of metrics, with the other files of a real record."""
    monkeypatch.setattr(drawing, "DPI", 10)

    def drawn(metrics: bytes, record: str = "digits") -> str:
        (original,) = committed(f"*_{record}")
        for name in ("config.json", "environment.txt"):
            shutil.copy(original / name, tmp_path)
        (tmp_path / "metrics.jsonl").write_bytes(metrics)
        try:
            assert main(Figures(str(tmp_path))) == 0
        except ExperimentError as error:
            known = str(tmp_path), "there is no method", "has no row to draw"
            assert any(text in str(error) for text in known)
            return str(error)
        figures = [*tmp_path.glob("*.png")]
        assert figures and all(path.read_bytes().startswith(b"\x89PNG") for path in figures)
        return ""

    return drawn


def joined(lines: list[str]) -> bytes:
    return "".join(line + "\n" for line in lines).encode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("record", "ends"), [("survey", 6), ("gossip", 4), *(slow(name, 1000) for name in DRAWN)]
)
def test_a_record_that_ends_early_is_drawn_or_refused(drawn: Drawn, record: str, ends: int) -> None:
    """After any row, as an interrupt leaves it; in a quick run after some."""
    lines = lines_of(record)
    apart = -(-len(lines) // ends)
    said = [
        drawn(joined(lines[:end]), record) for end in [*range(0, len(lines), apart), len(lines)]
    ]
    assert "has no" in said[0] and said[-1] == ""


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (b"", "has no row to draw"),
        (b'{"kind": "step"}', "not a valid row of metrics: a row of kind 'step' without `method`"),
        (b"[" * 100_000, "line 1 is not a valid row of metrics: too many brackets"),
        (b"9" * 5000, "line 1 is not a valid row of metrics"),
        (b'{"kind": "pace"}\n{"ki', "line 2 is not a valid row of metrics"),
        (b'{"kind": "pace", "x": NaN}', "1 is not a valid row of metrics: NaN is not valid JSON"),
        (b"\xff\n", "line 1 is not a valid row of metrics"),
    ],
)
def test_the_damaged_line_is_named(drawn: Drawn, metrics: bytes, message: str) -> None:
    assert message in drawn(metrics)


@pytest.mark.parametrize(
    ("record", "column", "value", "message"),
    [
        ("survey", "bytes_sent", "many", "`bytes_sent` must be a number of at least 0, got 'many'"),
        ("survey", "bytes_sent", 10**400, "`bytes_sent` must be a number of at least 0, got '1000"),
        ("survey", "train_loss", -1, "`train_loss` must be a number of at least 0, or null"),
        ("survey", "method", "$x^$", "`method` must be a short name of letters and digits, got"),
        ("digits", "bytes_sent", "many", "cannot be drawn"),
        ("digits", "bytes_sent", 10**400, "'1000000000000000000000000000000000000000' is not a"),
        ("digits", "method", "$x^$", "'$x^$' is not a short name of letters and digits, or a"),
        ("digits", "method", "means", ""),
        ("digits", "train_loss", None, ""),  # All diverged.
        ("digits", "bytes_sent", 0, ""),  # One worker sends nothing.
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_column_of_invalid_values(
    drawn: Drawn, record: str, column: str, value: Any, message: str
) -> None:
    """Of records before and after the common schema."""
    rows = [json.loads(line) for line in lines_of(record)]
    rows = [{**row, column: value} for row in rows if row["kind"] in ("step", "point")]
    said = drawn(joined([json.dumps(row) for row in rows]), record)
    assert (message in said) if message else said == "", said


ODD = [None, 0, -1, 1, 1e30, 1e-30, "mean", "matcha", True, [], {}, 10**400, "$x^$", ""]


def mutant(lines: list[str], choice: random.Random) -> bytes:
    """Removes or repeats lines, swaps or corrupts values, and truncates the file."""
    rows = [json.loads(line) for line in lines if choice.random() < 0.9]
    for _ in range(choice.randrange(4)):
        row = choice.choice(rows)
        name = choice.choice(list(row))
        other = choice.choice(rows)
        row[name] = choice.choice([*ODD, other.get(name)])
    if choice.random() < 0.5:
        column = choice.choice(["train_loss", "test_loss", "bytes_sent", "seconds", "step"])
        value = choice.choice([None, 0, 1e30])
        rows = [{**row, column: value} if column in row else row for row in rows]
    if choice.random() < 0.3:
        choice.shuffle(rows)
    raw = joined([json.dumps(row) for row in rows])
    return raw[: choice.randrange(len(raw))] if choice.random() < 0.1 else raw


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("record", "count"), [*((name, 2) for name in DRAWN), *(slow(name, 100) for name in DRAWN)]
)
def test_a_mutant_of_a_record_is_drawn_or_refused(drawn: Drawn, record: str, count: int) -> None:
    choice = random.Random(SEED)
    for _ in range(count):
        drawn(mutant(lines_of(record), choice), record)
