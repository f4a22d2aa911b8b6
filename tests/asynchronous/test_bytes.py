"""The bytes of the rows are those that the kernel counts between two nodes of Ray."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize(("bits", "token"), [(32, "a" * 64), (8, "")])
def test_bytes_between_nodes(bits: int, token: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    mode = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {}
    output = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("two_nodes.py")), str(bits)],
        env=environment | (mode or {"RAY_AUTH_MODE": "disabled"}),
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    ).stdout
    found = json.loads(output.splitlines()[-1])
    each = SIZE * bits // 8 + 4 * (bits < 32)
    assert found["up"] == UPDATES * each and found["down"] == UPDATES * SIZE * 4
    # What two workers have begun at the end is in no row.
    sent = found["up"] + found["down"] + 2 * (each + SIZE * 4)
    assert 0.97 * sent < found["on_loopback"] < 1.02 * sent
    assert ["has no token" in text for text in found["warnings"]] == [True] * (not token)
