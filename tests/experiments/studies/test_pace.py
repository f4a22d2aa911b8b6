"""Windows on the wall clock: the comparison, its record, and its processes."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

import experiments
from experiments.studies.pace import STUDY, TOLERANCE, compare
from experiments.study.command import read_results
from experiments.study.store import read
from experiments.training.pace import NON_BLOCKING, SYNCHRONOUS
from tests.records import committed

RECORDS = committed("*_pace*")


def launch(*arguments: str) -> None:
    command = [sys.executable, "-m", "experiments", "launch", "--processes", "2", "--", "pace"]
    subprocess.run([*command, *arguments], cwd=Path(experiments.__file__).parents[1],
                   env=dict(os.environ), check=True, timeout=300)  # fmt: skip


@pytest.mark.slow
def test_two_processes_leave_a_record_that_they_continue(tmp_path: Path) -> None:
    tiny = ["--repeats", "2", "--windows", "3", "--minibatch-seconds", "0.001", "--loss", "3"]
    launch(*tiny, "--records", str(tmp_path))
    (folder,) = tmp_path.iterdir()
    metrics, rows = folder / "metrics.jsonl", read(folder)
    keys = [(row["seed"], row["clock"], row["strategy"]) for row in rows if row["kind"] == "run"]
    assert keys == [*itertools.product((0, 1), ("wall", "simulated"), (SYNCHRONOUS, NON_BLOCKING))]
    lines = metrics.read_bytes().splitlines(keepends=True)
    ends = [number for number, row in enumerate(rows) if row["kind"] == "run"]
    metrics.write_bytes(b"".join(lines[: ends[-3] + 2]))  # Two runs are not there.
    launch("--resume", str(folder))
    again = metrics.read_bytes().splitlines(keepends=True)
    assert len(again) == len(lines) and again[: ends[-3] + 1] == lines[: ends[-3] + 1]
    assert [row["kind"] for row in read(folder)] == [row["kind"] for row in rows]
    assert "of one machine, windows of 4 mini-batches" in (folder / "README.md").read_text()


@pytest.mark.parametrize("folder", RECORDS, ids=lambda folder: folder.name)
def test_records_agree_with_the_simulator(folder: Path) -> None:
    results = read_results(STUDY, folder)
    speedups = {line.where: line["speedup"].mean for line in results.lines}
    ratio = speedups["simulated, non_blocking"] / speedups["wall, non_blocking"]
    assert abs(ratio - 1) <= TOLERANCE and speedups["wall, non_blocking"] > 1
    assert compare(results) in (folder / "README.md").read_text(encoding="utf-8")
