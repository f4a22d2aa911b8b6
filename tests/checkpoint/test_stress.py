"""120 random sequences of steps, saves, kills, restores and changes of the workers."""

import json

import pytest

from tests.checkpoint.running import run
from tests.checkpoint.sequences import sequence

SEQUENCES = 80
TOGETHER = 40
SECONDS = 30  # For each sequence, on a busy machine.


def test_sequences_are_of_all_kinds() -> None:
    ops = [op for seed in range(SEQUENCES) for op in sequence(seed).ops]
    assert {op.kind for op in ops} == {"step", "save", "kill", "restore", "resize"}
    assert any(event.spoiled >= 0 for op in ops for event in op.history)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEQUENCES, TOGETHER))
def test_sequences(first: int) -> None:
    program = ["-m", "tests.checkpoint.stress", str(first), str(TOGETHER)]
    ran = run(*program, devices=16, seconds=TOGETHER * SECONDS)
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert [line["failed"] for line in lines if line["failed"]] == []
    assert len(lines) == TOGETHER, ran.stderr[-3000:]
