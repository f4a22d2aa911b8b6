"""Processes that are killed, suspended or preempted in the middle of training."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes.running import environment

pytestmark = [
    pytest.mark.xdist_group("processes"),
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="not Linux: reads /proc"),
]

SECONDS = 150

# Each process counts steps in a collective over Gloo; process 0 writes the count as a checkpoint.
TRAINING = """
import os, pathlib, sys, time
from jaxcomm import launch
from jaxcomm.launch._environment import report_checkpoint
launch.initialize(save_on_sigterm=SAVES)
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
sharding = NamedSharding(mesh, PartitionSpec("data"))
ones = jax.make_array_from_process_local_data(sharding, jnp.ones(1))
total = jax.jit(jnp.sum)
folder = pathlib.Path("checkpoints")
def save(step):
    if launch.is_main_process():
        folder.mkdir(exist_ok=True)
        (folder / f"{step:06}").touch()
        report_checkpoint(folder / f"{step:06}")
print("pid", jax.process_index(), os.getpid(), flush=True)
for step in range(10**6):
    assert total(ones) == jax.process_count()
    if step == 5:
        print("steady", flush=True)
    time.sleep(0.02)
    if step % 10 == 0:
        save(step)
    if SAVES and launch.is_preempted(step):
        save(step)
        print("saved", step, flush=True)
        break
"""


class Launched:
    """A launcher whose processes are training, and what it has printed so far."""

    def __init__(self, folder: Path, processes: int, *options: str, saves: bool = False) -> None:
        self.folder, self.processes = folder, processes
        script = folder / "script.py"
        script.write_text(f"SAVES = {saves}\n{TRAINING}", encoding="utf-8")
        command = [sys.executable, "-m", "jaxcomm.launch", "--processes", str(processes)]
        self.stdout, self.stderr = folder / "stdout", folder / "stderr"
        with self.stdout.open("wb") as stdout, self.stderr.open("wb") as stderr:
            self.popen = subprocess.Popen(
                [*command, *options, "--", str(script)],
                cwd=folder,
                env=environment(),
                stdout=stdout,
                stderr=stderr,
            )

    def said(self) -> str:
        return self.stdout.read_text()

    def until(self, happened: Callable[[], bool], seconds: float = SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            over = self.popen.poll() is not None or time.monotonic() > deadline
            assert not over, f"{self.said()[-3000:]}\n{self.stderr.read_text()[-3000:]}"
            time.sleep(0.1)

    def until_steady(self) -> None:
        """Waits until all processes have trained a few steps."""
        self.until(lambda: self.said().count("steady") >= self.processes)

    def pid(self, process: int) -> int:
        (found,) = re.findall(rf"pid {process} (\d+)", self.said())
        return int(found)

    def end(self) -> str:
        """Waits; checks that no process is left; returns the standard error."""
        self.popen.wait(SECONDS)
        pids = [int(pid) for pid in re.findall(r"pid \d+ (\d+)", self.said())]
        assert pids and not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        return self.stderr.read_text()

    def checkpoint(self) -> str:
        return str(max((self.folder / "checkpoints").glob("*")))


@pytest.fixture
def launched(tmp_path: Path) -> Callable[..., Launched]:
    started: list[Launched] = []

    def launch(processes: int, *options: str, saves: bool = False) -> Launched:
        started.append(Launched(tmp_path, processes, *options, saves=saves))
        return started[-1]

    yield launch
    for each in started:
        each.popen.kill()
        each.popen.wait()


@pytest.mark.parametrize("process", [0, 2])
def test_a_suspended_process_ends_all(launched: Callable[..., Launched], process: int) -> None:
    run = launched(4, "--heartbeat-timeout", "5")
    run.until_steady()
    os.kill(run.pid(process), signal.SIGSTOP)
    started = time.monotonic()
    stderr = run.end()
    assert 3 < time.monotonic() - started < 40
    assert run.popen.returncode == 128 + signal.SIGSTOP
    assert stderr.splitlines()[-1] == (
        f"jaxcomm.launch: error: process {process} of 4 was stopped (SIGSTOP) and did not answer; "
        f"the others were stopped; the newest checkpoint is {run.checkpoint()}."
    )


def test_a_short_suspension_is_tolerated(launched: Callable[..., Launched]) -> None:
    run = launched(2, "--heartbeat-timeout", "20")
    run.until_steady()
    os.kill(run.pid(1), signal.SIGSTOP)
    time.sleep(2)
    before = run.checkpoint()
    os.kill(run.pid(1), signal.SIGCONT)
    run.until(lambda: run.checkpoint() > before)
    run.popen.send_signal(signal.SIGTERM)
    assert "interrupted: SIGTERM has stopped all" in run.end()


@pytest.mark.parametrize("to", ["launcher", "process"])
def test_all_save_the_same_step_before_they_end(launched: Callable[..., Launched], to: str) -> None:
    run = launched(4, "--grace", "60", saves=True)
    run.until_steady()
    os.kill(run.popen.pid if to == "launcher" else run.pid(2), signal.SIGTERM)
    stderr = run.end()
    assert run.popen.returncode == 128 + signal.SIGTERM, stderr
    saved = re.findall(r"saved (\d+)", run.said())
    assert len(set(saved)) == 1 and len(saved) == 4
    assert Path(run.checkpoint()).name == f"{int(saved[0]):06}"
    assert stderr.splitlines()[-1] == (
        "jaxcomm.launch: interrupted: SIGTERM has stopped all processes; the newest checkpoint is "
        f"{run.checkpoint()}."
    )
