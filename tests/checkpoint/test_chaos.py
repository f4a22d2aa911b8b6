"""Kills at random moments of a training do not show in its end."""

import pathlib
import sys

import pytest

from tests.checkpoint import chaos

SECONDS = 75.0
SEED = 0


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
@pytest.mark.skipif(sys.platform != "linux", reason="not Linux: reads /proc")
def test_a_training_with_kills_loses_no_sample_and_no_gradient(tmp_path: pathlib.Path) -> None:
    ended = chaos.run(tmp_path, SECONDS, SEED)
    processes, launchers = ended.kills
    assert processes >= 1 and launchers >= 1
    assert ended.left == []
    assert ended.said.count("start again") >= processes
    ended.found.check(ended.steps)
