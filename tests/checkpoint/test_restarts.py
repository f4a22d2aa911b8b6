"""After a death, training goes on by itself from the last checkpoint."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.growing import BATCH, RATE, STEPS
from tests.checkpoint.restarting import SAMPLES

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]


def launch(folder: pathlib.Path, options: str, module: str, *arguments: int) -> tuple[Any, str]:
    """What process 0 has found, and what the launcher has said."""
    folder.mkdir(exist_ok=True)
    root = pathlib.Path(__file__).parents[2]
    program = ["-m", f"tests.checkpoint.{module}", str(folder), *map(str, arguments)]
    flags = " ".join(f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f)
    words = ["--processes", "4", *options.split(), "--", *program]
    ran = subprocess.run(
        [sys.executable, "-m", "jaxcomm.launch", *words],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads((folder / "0.json").read_text()), ran.stderr


def test_a_replacement_goes_on_bit_for_bit(tmp_path: pathlib.Path) -> None:
    undisturbed, said = launch(tmp_path / "a", "", "restarting", 0)
    assert "start again" not in said
    disturbed, said = launch(tmp_path / "b", "--restarts 1", "restarting", 8)
    assert disturbed == undisturbed
    saves = tmp_path / "b" / "saves" / "5"
    assert "process 2 of 4 has ended with signal SIGKILL" in said
    assert f"4 start again from the checkpoint {saves} (restart 1 of 1)" in said


def test_fewer_go_on_without_losing_a_sample(tmp_path: pathlib.Path) -> None:
    found, said = launch(tmp_path, "--restarts 1 --min-processes 3", "restarting", 8)
    assert "3 start again from the checkpoint" in said
    assert found["workers"] == 3
    ends = [0, *(last for _, last in found["seen"])]
    assert [first for first, _ in found["seen"]] == ends[:-1]
    assert ends[-1] == SAMPLES
    assert {last - first for first, last in found["seen"]} == {8, 6}


def test_8_4_3_8_workers_lose_neither_residuals_nor_samples(tmp_path: pathlib.Path) -> None:
    """From 4 to 3 by a death."""
    launch(tmp_path, "--devices-per-process 2", "growing", 10, 0)
    _, said = launch(tmp_path, "--restarts 1 --min-processes 3", "growing", 30, 17)
    assert "3 start again from the checkpoint" in said
    found, _ = launch(tmp_path, "--devices-per-process 2", "growing", STEPS, 0)
    assert found["starts"] == [[8, 0], [4, 10 * BATCH], [3, 15 * BATCH], [8, 30 * BATCH]]
    assert found["seen"] == [*range(0, STEPS * BATCH, BATCH)]
    moved, residual, total = (np.array(found[name]) for name in ("moved", "residual", "sum"))
    assert np.abs(residual).min() > 0.01
    np.testing.assert_allclose(-moved / RATE + residual, total / BATCH, rtol=0, atol=1e-4)
