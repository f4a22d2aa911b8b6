"""Four real processes save; four others go on bit for bit, and three others with means."""

import json
import pathlib

import pytest

from tests.checkpoint.program import FAMILIES
from tests.checkpoint.running import launch

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]


def run(folder: pathlib.Path, phase: str, processes: int) -> list[dict[str, str]]:
    launch(f"--processes {processes}", "program", folder, phase)
    return [json.loads((folder / f"{phase}-{p}.json").read_text()) for p in range(processes)]


def test_four_processes(tmp_path: pathlib.Path) -> None:
    expected = run(tmp_path, "begin", 4)
    assert {*expected[0]} == {*FAMILIES}
    assert run(tmp_path, "continue", 4) == expected
    found = run(tmp_path, "resize", 3)
    for name in FAMILIES:
        assert "is of 4 workers, and `start` is for 3" in found[0][f"{name}: error"]
