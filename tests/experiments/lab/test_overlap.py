"""The measurement of exchanges beside steps: its options and summaries; the lab itself is slow."""

import os
import shutil
import subprocess
import sys

import pytest

from experiments.lab.overlap import Form, of_steps, offsets


def test_waits_are_of_the_steps_that_begin_or_apply() -> None:
    begins, arrives = offsets(10, 2, 3)
    steps = [float(number in begins) + 10 * (number in arrives) + 5 for number in range(10)] * 2
    assert of_steps(steps, begins, arrives, 10) == Form(7.2, 5.0, 1.0, 10.0)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("tc") is None or os.geteuid() != 0, reason="no root or no tc")
def test_exchanges_beside_steps_take_less_time() -> None:
    """On a link on which an exchange takes several steps, and both are the same bytes."""
    command = [sys.executable, "-m", "experiments.lab.overlap", "--rounds", "1", "--periods", "1"]
    done = subprocess.run([*command, "--model", "transformer"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[1]: line.split()[2:] for line in done.stdout.splitlines()[2:]}
    whole, beside = ([float(x) for x in rows[form]] for form in ("one_program", "overlapped"))
    assert beside[0] < whole[0]
    assert beside[2] < whole[2] / 2  # The step that begins an exchange does not wait for it.
    assert beside[4] == pytest.approx(whole[4], rel=0.05)
