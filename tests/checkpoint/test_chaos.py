"""Kills at random moments of a training do not show in its end."""

import pathlib
import sys

import pytest

from tests.checkpoint import chaos

SECONDS = 90.0
SEED = 0


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
@pytest.mark.skipif(sys.platform != "linux", reason="not Linux: reads /proc")
def test_a_training_with_kills_ends_as_one_without(tmp_path: pathlib.Path) -> None:
    """`chaos.run` asserts that each sample was seen once in each epoch."""
    found = chaos.run(tmp_path, SECONDS, SEED)
    processes, launchers = found.kills
    assert processes >= 1 and launchers >= 1
    assert found.left == []
    low, high = found.interval()
    assert low <= found.trained.loss <= high
    assert found.said.count("start again") >= processes
