"""120 random sequences of steps, saves, kills, restores and changes of the workers."""

import json
import pathlib
import signal
import subprocess

import pytest

from tests.checkpoint.running import run
from tests.checkpoint.sequences import sequence

SEQUENCES = 120
TOGETHER = 40
SECONDS = 30  # For each sequence, on a busy machine.
REAL = [seed for seed in range(SEQUENCES) if sequence(seed).kills() == 2][:3]


def stress(seed: int, *what: str, seconds: float) -> subprocess.CompletedProcess[str]:
    arguments = ["-m", "tests.checkpoint.stress", str(seed), *what]
    return run(*arguments, devices=16, seconds=seconds)


def test_sequences_are_of_all_kinds() -> None:
    ops = [op for seed in range(SEQUENCES) for op in sequence(seed).ops]
    assert {op.kind for op in ops} == {"step", "save", "kill", "restore", "resize"}
    assert any(event.spoiled >= 0 for op in ops for event in op.history)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEQUENCES, TOGETHER))
def test_sequences(first: int) -> None:
    ran = stress(first, str(TOGETHER), seconds=TOGETHER * SECONDS)
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert [line["failed"] for line in lines if line["failed"]] == []
    assert len(lines) == TOGETHER, ran.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("seed", REAL)
def test_kills_of_real_processes(seed: int, tmp_path: pathlib.Path) -> None:
    for _ in range(2):
        ran = stress(seed, "--until-killed", str(tmp_path), seconds=120)
        assert ran.returncode == -signal.SIGKILL, ran.stderr[-3000:]
    ran = stress(seed, "--until-killed", str(tmp_path), seconds=120)
    assert ran.returncode == 0, ran.stderr[-3000:]
