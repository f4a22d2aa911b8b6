"""Full disks, and runs that are killed while they save."""

import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import pytest

from jaxcomm.checkpoint import Checkpoints
from tests.checkpoint.running import environment, run

PROGRAM = """
import sys
import numpy as np, jax.numpy as jnp
from jaxcomm.checkpoint import CheckpointError, Checkpoints

size = int(sys.argv[2])
state = lambda n: {"w": jnp.asarray(np.random.default_rng(n).normal(size=size), jnp.float32)}
checkpoints = Checkpoints(sys.argv[1], keep=2)
for step in range(1, 50):
    try:
        checkpoints.save(step, state(step))
        checkpoints.wait()
    except CheckpointError as error:
        print(f"{step}: {error}")
        break
    print("saved", step, flush=True)
if sys.argv[3:]:
    for _ in range(2):
        found = checkpoints.restore(state(0))
        assert bool(jnp.all(found.state["w"] == state(found.step)["w"]))
        print("restored", found.step)
        checkpoints.close()
        checkpoints = Checkpoints(sys.argv[1], keep=2)
"""

AFTERWARDS = """
import sys
import numpy as np, jax.numpy as jnp
from jaxcomm.checkpoint import Checkpoints
state = lambda n: {"w": jnp.asarray(np.random.default_rng(n).normal(size=3000000), jnp.float32)}
with Checkpoints(sys.argv[1], keep=2) as checkpoints:
    found = checkpoints.restore(state(0))
    assert bool(jnp.all(found.state["w"] == state(found.step)["w"]))
    checkpoints.save(found.step + 1, state(1))
    checkpoints.wait()
    print(found.step, checkpoints.steps)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="not Linux: a file system in memory, for one process"
)
def test_a_full_disk(tmp_path: pathlib.Path) -> None:
    """Two checkpoints of 2 MB fit in 5 MB; the third does not, beside them."""
    if shutil.which("unshare") is None:
        pytest.skip("no root or no tc: there is no `unshare`")
    mount = f"mount -t tmpfs -o size=5m tmpfs {tmp_path}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("no root or no tc: this user may not mount")
    (tmp_path / "program.py").write_text(PROGRAM)
    program = (tmp_path / "program.py").rename(tmp_path.parent / f"{tmp_path.name}.py")
    script = f"{mount} && exec {sys.executable} {program} {tmp_path}/saves 500000 restore"
    ran = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = ran.stdout.splitlines()
    assert lines[:2] == ["saved 1", "saved 2"], ran.stderr
    assert "3: The checkpoint of step 3 could not be written to" in lines[2]
    assert "No space left on device" in lines[2]
    assert lines[2].endswith("Earlier checkpoints are as they were.")
    assert lines[3:] == ["restored 2"] * 2, ran.stderr


def test_readers_do_not_disturb_the_writer(tmp_path: pathlib.Path) -> None:
    """Another program that restores sees new checkpoints, and removes nothing."""
    state = {"w": jnp.ones(4)}
    with Checkpoints(tmp_path) as writer, Checkpoints(tmp_path) as reader:
        writer.save(1, state)
        writer.wait()
        assert reader.steps == (1,)
        (tmp_path / "2.orbax-checkpoint-tmp").mkdir()
        with Checkpoints(tmp_path) as other:
            assert other.restore(state).step == 1
        assert (tmp_path / "2.orbax-checkpoint-tmp").exists()
    with Checkpoints(tmp_path) as writer:
        writer.save(3, state)
    assert {path.name for path in tmp_path.iterdir()} == {"1", "3"}


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.005, 0.02, 0.06])
def test_killed_while_saving(tmp_path: pathlib.Path, delay: float) -> None:
    """What a killed run leaves is complete, and the next run goes on from there."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "saves"), "3000000"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as saving:
        assert saving.stdout is not None
        while "saved 3" not in saving.stdout.readline():
            pass
        time.sleep(delay)
        saving.send_signal(signal.SIGKILL)
    ran = run("-c", AFTERWARDS, str(tmp_path / "saves"), seconds=120)
    assert ran.returncode == 0, ran.stderr
    step = int(ran.stdout.split()[0])
    assert step >= 3
    assert ran.stdout.strip() == f"{step} {(step, step + 1)}"
    left = {path.name for path in (tmp_path / "saves").iterdir()}
    assert left == {str(step), str(step + 1)}
