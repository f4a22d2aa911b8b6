"""The bytes of the rows are those that the kernel counts between two nodes of Ray."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.asynchronous.two_nodes import SIZE, UPDATES

ROOT = Path(__file__).parents[2]
can_unshare = subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no Ray"),
    pytest.mark.skipif(not can_unshare, reason="no root or no tc"),
]


@pytest.mark.parametrize(
    ("method", "upload", "download", "token"),
    [
        ("server", SIZE * 4, SIZE * 4, "a" * 64),
        ("server_8_bits", SIZE + 4, SIZE * 4, ""),
        # A skipped upload is 5 bytes, and the parameters come with 8.
        ("lag_wk", SIZE * 4, SIZE * 4 + 8, ""),
        ("laq", SIZE + 4, SIZE * 4 + 8, ""),
    ],
)
def test_bytes_between_nodes(method: str, upload: int, download: int, token: str) -> None:
    found = run(method, token)
    lazy = method.startswith("la")
    uploads = len(found["uploads"])
    assert uploads == (10 if lazy else UPDATES)
    assert found["up"] == uploads * upload + lazy * 5 * UPDATES
    # The first parameters are also where the memory of a lazy worker begins.
    assert found["down"] == UPDATES * download + lazy * 2 * SIZE * 4
    # What two workers have begun at the end is in no row.
    least = found["up"] + found["down"]
    assert 0.97 * least < found["on_loopback"] < 1.02 * (least + 2 * (upload + download))
    assert ["has no token" in text for text in found["warnings"]] == [True] * (not token)


def test_bytes_between_two_that_meet() -> None:
    found = run("pairs", "")
    sent, each = found["up"], SIZE * 4
    # Two messages for each gradient, whichever sends first. Each download is another's upload.
    assert 2 * each * (UPDATES - 2) <= sent <= 2 * each * (UPDATES + 2)
    assert abs(sent - found["down"]) <= 2 * each
    # Two more have begun at the end, and the first and the last parameters go to and from a node.
    assert 0.97 * sent < found["on_loopback"] < 1.02 * 2 * each * (UPDATES + 2 + 1)


def run(method: str, token: str) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    mode = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {}
    output = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("two_nodes.py")), method],
        env=environment | (mode or {"RAY_AUTH_MODE": "disabled"}),
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    ).stdout
    found = json.loads(output.splitlines()[-1])
    assert found["is_replayed"]
    return found
