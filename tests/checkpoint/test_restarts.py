"""After a death, training goes on by itself from the last checkpoint."""

import pathlib

import pytest

from tests.checkpoint.growing import BATCH, read
from tests.checkpoint.running import launch

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

STEPS = 20


def test_a_replacement_continues_bit_for_bit(tmp_path: pathlib.Path) -> None:
    said = launch("--processes 4", "growing", tmp_path / "a", STEPS, 0, 0)
    assert "start again" not in said
    said = launch("--processes 4 --restarts 1", "growing", tmp_path / "b", STEPS, 8, 0)
    undisturbed, disturbed = read(tmp_path / "a"), read(tmp_path / "b")
    assert disturbed == undisturbed._replace(starts=[[4, 0], [4, 5 * BATCH]])
    assert "process 2 of 4 has ended with signal SIGKILL" in said
    saves = tmp_path / "b" / "saves" / "5"
    assert f"4 start again from the checkpoint {saves} (restart 1 of 1)" in said


def test_resizing_8_4_3_8_keeps_residuals_and_samples(tmp_path: pathlib.Path) -> None:
    """From 4 to 3 by a death."""
    launch("--processes 4 --devices-per-process 2", "growing", tmp_path, 5, 0, 0)
    options = "--processes 4 --restarts 1 --min-processes 3"
    said = launch(options, "growing", tmp_path, 15, 12, 0)
    assert "3 start again from the checkpoint" in said
    launch("--processes 4 --devices-per-process 2", "growing", tmp_path, STEPS, 0, 0)
    found = read(tmp_path)
    found.check(STEPS)
    assert found.starts == [[8, 0], [4, 5 * BATCH], [3, 10 * BATCH], [8, 15 * BATCH]]
