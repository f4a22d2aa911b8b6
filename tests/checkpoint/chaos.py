"""A training of four processes: every 12 to 24 seconds a random one, or the launcher, is killed.

`python -m tests.checkpoint.chaos 600 [SEED]` does so for 600 seconds, and prints what it has found.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.checkpoint.growing import Found, read
from tests.checkpoint.running import ROOT, environment

PROCESSES = 4
FEWEST = 3
LEAST = 12.0  # Seconds between two kills; the most is twice as long.
PACE = 0.05  # Seconds that a step waits, so that a run lasts.


class Chaos(NamedTuple):
    """What a disturbed run has come to.

    Attributes:
      found: Its end.
      steps: How many it had to do.
      kills: How many processes were killed, and how many launchers.
      left: Processes that live after the end.
      said: What the launcher said.
    """

    found: Found
    steps: int
    kills: tuple[int, int]
    left: list[int]
    said: str


def is_alive(pid: int) -> bool:
    """Whether the process runs; an orphan without a waiting parent has ended too."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _alive(folder: Path) -> list[int]:
    """The processes of the training that run."""
    pids = [int(path.name) for path in (folder / "pids").glob("*")]
    return [pid for pid in pids if is_alive(pid)]


def run(folder: Path, seconds: float, seed: int) -> Chaos:
    """Kills until the time is over, and waits for the end."""
    draw, steps = random.Random(seed), round(seconds / (2 * PACE))
    most = int(seconds / LEAST) + 1
    options = f"--processes {PROCESSES} --min-processes {FEWEST} --restarts {most} --grace 30"
    command = [sys.executable, "-m", "jaxcomm.launch", *options.split(), "--", "-m"]
    command += ["tests.checkpoint.growing", str(folder), str(steps), "0", str(PACE)]
    began, processes, launchers = time.monotonic(), 0, 0
    deadline = began + 3 * seconds + 300
    with (folder / "said").open("wb") as said:

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=said, stderr=said)

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
    time.sleep(1)
    return Chaos(read(folder), steps, (processes, launchers), _alive(folder), text)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        given = [*sys.argv[2:], "0"]
        chaos = run(Path(directory), float(sys.argv[1]), int(given[0]))
        print("\n".join(x for x in chaos.said.splitlines() if x.startswith("jaxcomm.launch:")))
        print(chaos.found.starts, chaos.kills, chaos.left)
        chaos.found.check(chaos.steps)
