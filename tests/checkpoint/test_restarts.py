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


def run(folder: pathlib.Path, options: list[str], kill_at: int, then: str = "") -> Any:
    folder.mkdir(exist_ok=True)
    return launch(folder, options, "tests.checkpoint.restarting", str(kill_at), then)


def launch(folder: pathlib.Path, options: list[str], module: str, *arguments: str) -> Any:
    root = pathlib.Path(__file__).parents[2]
    program = ["-m", module, str(folder), *arguments]
    flags = " ".join(f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f)
    ran = subprocess.run(
        [sys.executable, "-m", "jaxcomm.launch", "--processes", "4", *options, "--", *program],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads((folder / "0.json").read_text()), ran.stderr


def test_a_replacement_goes_on_bit_for_bit(tmp_path: pathlib.Path) -> None:
    undisturbed, said = run(tmp_path / "a", [], 0)
    assert "start again" not in said
    disturbed, said = run(tmp_path / "b", ["--restarts", "1"], 8)
    assert disturbed == undisturbed
    saves = tmp_path / "b" / "saves" / "5"
    assert "process 2 of 4 has ended with signal SIGKILL" in said
    assert f"4 start again from the checkpoint {saves} (restart 1 of 1)" in said


def test_fewer_go_on_without_losing_a_sample(tmp_path: pathlib.Path) -> None:
    (tmp_path / "available").write_text("4")
    options = [
        "--restarts",
        "1",
        "--min-processes",
        "3",
        "--available",
        str(tmp_path / "available"),
    ]
    found, said = run(tmp_path, options, 8, "3")
    assert "3 start again from the checkpoint" in said
    assert found["workers"] == 3
    ends = [0, *(last for _, last in found["seen"])]
    assert [first for first, _ in found["seen"]] == ends[:-1]
    assert ends[-1] == SAMPLES
    assert {last - first for first, last in found["seen"]} == {8, 6}


def test_growing_back_loses_neither_residuals_nor_samples(tmp_path: pathlib.Path) -> None:
    """With 4, then 3, then 4 processes."""
    (tmp_path / "available").write_text("4")
    options = ["--restarts", "1", "--min-processes", "3", "--grace", "60", "--available"]
    found, said = launch(
        tmp_path, [*options, str(tmp_path / "available")], "tests.checkpoint.growing"
    )
    assert "3 start again from the checkpoint" in said
    assert "there is room for more than 3 processes; 4 start again from the checkpoint" in said
    (first, began), (second, fewer), (third, more) = found["starts"]
    assert (first, began, second, fewer, third) == (4, 0, 3, 5 * BATCH, 4)
    assert fewer < more < STEPS * BATCH
    assert found["seen"] == [*range(0, STEPS * BATCH, BATCH)]
    moved, residual, total = (np.array(found[name]) for name in ("moved", "residual", "sum"))
    assert np.abs(residual).min() > 0.01
    np.testing.assert_allclose(-moved / RATE + residual, total / BATCH, rtol=0, atol=1e-4)
