"""Four real processes save; four others go on bit for bit, and three others with means."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.checkpoint.program import FAMILIES

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]


def run(folder: pathlib.Path, phase: str, processes: int) -> list[dict[str, str]]:
    words = ["--processes", str(processes), "--", "-m", "tests.checkpoint.program"]
    root = pathlib.Path(__file__).parents[2]
    flags = " ".join(f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f)
    ran = subprocess.run(
        [sys.executable, "-m", "jaxcomm.launch", *words, str(folder), phase],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [json.loads((folder / f"{phase}-{p}.json").read_text()) for p in range(processes)]


def test_four_processes(tmp_path: pathlib.Path) -> None:
    expected = run(tmp_path, "begin", 4)
    assert {*expected[0]} == {*FAMILIES}
    assert run(tmp_path, "continue", 4) == expected
    found = run(tmp_path, "resize", 3)
    for name in FAMILIES:
        assert "is of 4 workers, and `start` is for 3" in found[0][f"{name}: error"]
