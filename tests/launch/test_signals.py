"""Signals to the launcher: never lost between two starts, and time to save. None needs JAX."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

import jaxcomm
from jaxcomm.launch import _processes, parse, start
from jaxcomm.launch._processes import Outcome
from jaxcomm.launch._restarts import Restarts

ROOT = str(Path(jaxcomm.__file__).parents[1])
FAILS = "import os, sys; print('start', os.environ['JAXCOMM_RESTARTS'], flush=True); sys.exit(3)"
PREEMPTED = "from jaxcomm.launch._run_directory import report; report('preempted')"


def launch(*options: str, code: str) -> int:
    return start(parse([*options, "--", "-c", code], "launch"), "launch")


@pytest.mark.quick(1)
@pytest.mark.parametrize(("code", "ended"), [(FAILS, 3), (PREEMPTED, 143)])
def test_a_signal_after_the_plan_ends_the_launch(
    code: str, ended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    conclude, plans = Restarts.conclude, []

    def interrupted(self: Restarts, outcome: Outcome, program: str) -> str | None:
        line = conclude(self, outcome, program)
        plans.append(self.starts_again)
        os.kill(os.getpid(), signal.SIGTERM)
        return line

    monkeypatch.setattr(Restarts, "conclude", interrupted)
    monkeypatch.setenv("PYTHONPATH", ROOT)
    assert launch("--processes", "1", "--restarts", "5", code=code) == ended
    assert plans == [True]


def test_a_long_grace_is_not_for_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_processes, "GRACE_SECONDS", 0.3)
    code = (
        "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "time.sleep(1); sys.exit(4) if os.environ['JAX_PROCESS_ID'] == '1' else time.sleep(100)"
    )
    started = time.monotonic()
    assert launch("--grace", "90", code=code) == 4
    assert time.monotonic() - started < 60


def test_a_long_grace_is_for_signals(tmp_path: Path) -> None:
    code = (
        "import pathlib, signal, sys, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "def save(*_):\n    time.sleep(1)\n    (folder / 'saved').touch()\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n(folder / 'ready').touch()\ntime.sleep(100)"
    )

    def press() -> None:
        deadline = time.monotonic() + 30
        while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=press).start()
    assert launch("--processes", "1", "--grace", "30", code=code) == 128 + signal.SIGTERM
    assert (tmp_path / "saved").exists()
