"""Windows on the wall clock: the comparison, its record, and its processes."""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import experiments
from experiments.__main__ import main
from experiments.cli.errors import ExperimentError
from experiments.cli.launch import check
from experiments.studies.pace import STUDY, TOLERANCE, Pace, compare
from experiments.study.command import read_results
from experiments.study.store import read
from experiments.tasks.task import Task
from experiments.training import pace
from experiments.training.pace import NON_BLOCKING, SYNCHRONOUS, inputs, simulate_run
from experiments.training.real_time import Timings, worker_batches
from tests.records import committed

RECORDS = committed("*_pace*")


def test_runs_depend_on_the_measured_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace.jax, "process_count", lambda: 2)
    config = Pace(minibatches=4, deadline_slack=1.5)
    wall = {"kind": "run", "clock": "wall"}
    rows = [
        {**wall, "seed": 0, "minibatch_seconds": [0.1, 0.3], "exchange_seconds": 0.2},
        {**wall, "seed": 1, "minibatch_seconds": [0.2, 0.4], "exchange_seconds": 0.2},
        {**wall, "seed": 1, "minibatch_seconds": [0.4, 0.6], "exchange_seconds": 0.4},
        {"kind": "run", "clock": "simulated", "seed": 1, "minibatch_seconds": [9.0, 9.0]},
    ]
    waiting, moving = ({"clock": "wall", "strategy": name} for name in (SYNCHRONOUS, NON_BLOCKING))
    assert inputs(config, [], waiting, 0) == inputs(config, rows, waiting, 1) == {}
    assert inputs(config, rows, moving, 1) == {"deadline": pytest.approx(0.6)}
    found = inputs(config, rows, {**moving, "clock": "simulated"}, 1)
    assert found.pop("minibatch_seconds") == pytest.approx([0.3, 0.5])
    assert found == {"deadline": pytest.approx(0.6), "exchange_seconds": pytest.approx(0.3)}
    monkeypatch.setattr(pace.jax, "process_count", lambda: 3)
    with pytest.raises(ExperimentError, match=r"of 2 processes, got 3\. Use --processes 2 of"):
        inputs(config, rows, waiting, 2)


def test_workers_iterate_over_their_own_shards() -> None:
    task = Task("digits")
    each = len(task.dataset.train_inputs) // 4
    seen = [
        np.concatenate([x for x, _ in itertools.islice(worker_batches(task, w, 4, each, 0), 2)])
        for w in range(4)
    ]
    for images in seen:
        first, second = np.split(images.reshape(2 * each, -1), 2)
        assert not np.array_equal(first, second)
    assert len(np.unique(np.concatenate(seen).reshape(8 * each, -1), axis=0)) > 3 * each


@pytest.mark.slow
def test_the_simulated_clock() -> None:
    task, config = Task("digits"), Pace(log_every=1)
    speeds = Timings(np.array([0.02, 0.06]), 0.01)
    fast = simulate_run(task, config, 0.085, speeds, 0, 2)
    np.testing.assert_allclose(fast.seconds, [0.095, 0.19], rtol=1e-5)
    assert fast.minibatches == 10
    waiting = simulate_run(task, config, math.inf, speeds, 0, 2)
    np.testing.assert_allclose(waiting.seconds, [0.25, 0.5], rtol=1e-5)
    assert waiting.minibatches == 16


def test_pace_requires_launch(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(["pace", "--repeats", "1"]) == ["pace", "--repeats", "1", "--distributed"]
    assert main(["pace", "--record", "none"]) == 2
    assert "launch --processes 4 -- pace" in capsys.readouterr().err


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
