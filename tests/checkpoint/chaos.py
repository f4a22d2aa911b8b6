"""A training of four processes: every 20 to 40 seconds a random one, or the launcher, is killed.

`python -m tests.checkpoint.chaos 600 [SEED]` does so for 600 seconds, and prints what it has found.
"""

import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.checkpoint.enduring import BATCH, EPOCH, Trained

ROOT = Path(__file__).parents[2]
PROCESSES = 4
FEWEST = 3
LEAST = 20.0  # Seconds between two kills; the most is twice as long.
PACE = 0.05  # Seconds that a step waits, so that a run lasts.
SEEDS = 5
QUANTILE = 2.776  # Of Student's t with 4 degrees of freedom, for 95 %.


class Chaos(NamedTuple):
    """What a disturbed run has come to.

    Attributes:
      trained: Its end.
      undisturbed: Losses of undisturbed runs of as many samples, by seed; the first has its seed.
      kills: How many processes were killed, and how many launchers.
      left: Processes that live after the end.
      said: What the launcher said.
    """

    trained: Trained
    undisturbed: list[float]
    kills: tuple[int, int]
    left: list[int]
    said: str

    def interval(self) -> tuple[float, float]:
        """In which a loss of one more seed is expected (95 %)."""
        mean = sum(self.undisturbed) / SEEDS
        variance = sum((x - mean) ** 2 for x in self.undisturbed) / (SEEDS - 1)
        half = QUANTILE * math.sqrt(variance * (1 + 1 / SEEDS))
        return mean - half, mean + half


def environment(devices: int) -> dict[str, str]:
    """Each process has so many devices."""
    kept = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
    flags = [*kept, f"--xla_force_host_platform_device_count={devices}"]
    path = {"PYTHONPATH": str(ROOT), "XLA_FLAGS": " ".join(flags)}
    return {**os.environ, **path, "JAX_PLATFORMS": "cpu"}


def is_alive(pid: int) -> bool:
    """Whether the process runs; an orphan that nobody waits for has ended too."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _alive(folder: Path) -> list[int]:
    """The processes of the training that run."""
    pids = [int(path.name) for path in (folder / "pids").glob("*")]
    return [pid for pid in pids if is_alive(pid)]


def undisturbed(folder: Path, steps: int, seed: int) -> list[float]:
    """The losses of several seeds, in one process with as many devices."""
    program = (
        "import sys, json; from pathlib import Path; from tests.checkpoint.enduring import train\n"
        f"print(json.dumps([train(Path(sys.argv[1]) / str(i), {seed} + i, {steps}).loss "
        f"for i in range({SEEDS})]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        env=environment(PROCESSES),
        capture_output=True,
        text=True,
        timeout=120 + steps,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    losses: list[float] = json.loads(ran.stdout.splitlines()[-1])
    return losses


def disturbed(folder: Path, steps: int, seconds: float, seed: int) -> tuple[tuple[int, int], str]:
    """Kills until the time is over; returns how many processes and launchers, and what was said."""
    draw = random.Random(seed)
    most = int(seconds / LEAST) + 1
    options = f"--processes {PROCESSES} --min-processes {FEWEST} --restarts {most} --grace 30"
    command = [sys.executable, "-m", "jaxcomm.launch", *options.split()]
    command += ["--", "-m", "tests.checkpoint.enduring", str(folder), str(seed), str(steps)]
    command += [str(PACE)]
    began, processes, launchers = time.monotonic(), 0, 0
    deadline = began + 3 * seconds + 300
    with (folder / "said").open("wb") as said:

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(command, cwd=ROOT, env=environment(1), stdout=said, stderr=said)

        launcher = start()
        try:
            until = began + draw.uniform(LEAST, 2 * LEAST)
            while launcher.poll() is None:
                time.sleep(0.2)
                now = time.monotonic()
                assert now < deadline, (folder / "said").read_text()[-3000:]
                alive = _alive(folder)
                if now < until or now > began + seconds or not alive:
                    continue
                until = now + draw.uniform(LEAST, 2 * LEAST)
                if (processes + launchers) % 3 == 1:  # It starts again with all processes.
                    launchers += 1
                    launcher.kill()
                    launcher.wait()
                    time.sleep(1)
                    assert not _alive(folder)
                    launcher = start()
                else:
                    processes += 1
                    os.kill(draw.choice(alive), signal.SIGKILL)
        finally:
            launcher.kill()
            launcher.wait()
    text = (folder / "said").read_text()
    assert launcher.returncode == 0, text[-3000:]
    return (processes, launchers), text


def run(folder: Path, seconds: float, seed: int) -> Chaos:
    """A disturbed run of about so many seconds, and undisturbed ones of as many steps."""
    epochs = max(1, round(seconds / (2 * PACE) * BATCH / EPOCH))
    steps = epochs * EPOCH // BATCH
    kills, said = disturbed(folder, steps, seconds, seed)
    time.sleep(1)
    left = _alive(folder)
    loss, counts, digest, workers = json.loads((folder / "trained.json").read_text())
    trained = Trained(loss, tuple(counts), digest, workers)
    assert sum(number for _, number in workers) == steps
    assert counts == [epochs, epochs], counts
    return Chaos(trained, undisturbed(folder / "undisturbed", steps, seed), kills, left, said)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        given = [*sys.argv[2:], "0"]
        began = time.monotonic()
        found = run(Path(directory), float(sys.argv[1]), int(given[0]))
        print("\n".join(x for x in found.said.splitlines() if x.startswith("jaxcomm.launch:")))
        print(found._replace(said=""), "interval", found.interval())
        print(f"{time.monotonic() - began:.0f} s with the undisturbed runs")
