"""Figures of interrupted records: a figure, or one line that says what is wrong."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from experiments.cli.configs import Figures
from experiments.cli.errors import ExperimentError
from experiments.study import drawing
from experiments.study.figures import main
from tests.records import committed

# The values that select the rows of a short record, for columns that it has.
KEPT: dict[str, set[Any]] = {
    "method": {"mean", "qsgd", "truncating", "all_gather", "s2_mean_1", "dpsgd", "matcha", "sgp"},
    "graph": {"ring_8"},
    "seed": {0, 1, 5},
}
CURVES = {"step", "point"}


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


def drawn(folder: Path, lines: list[str], record: str) -> str:
    """Draws from some lines of metrics, with the other files of a real record; what was wrong."""
    (original,) = committed(f"*_{record}")
    for name in ("config.json", "environment.txt"):
        shutil.copy(original / name, folder)
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    try:
        assert main(Figures(str(folder))) == 0
    except ExperimentError as error:
        assert "has no row to draw" in str(error) or str(folder) in str(error)
        return str(error)
    figures = [*folder.glob("*.png")]
    assert figures and all(path.read_bytes().startswith(b"\x89PNG") for path in figures)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("record", ["digits", "estimate", "gossip", "sparse", "survey"])
def test_a_record_that_ends_early_is_drawn_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: str
) -> None:
    """After some row, as an interrupt leaves it."""
    monkeypatch.setattr(drawing, "DPI", 10)
    lines = lines_of(record)
    said = [drawn(tmp_path, lines[: len(lines) * part // 4], record) for part in range(5)]
    assert "has no" in said[0] and said[-1] == ""
