"""Processes that are started again, of which none needs JAX."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from jaxcomm.launch import _processes, parse, start
from jaxcomm.launch._processes import Outcome
from jaxcomm.launch._restarts import Plan

FAILS = "import os, sys; print('start', os.environ['JAXCOMM_RESTARTS'], flush=True); sys.exit(3)"


def launch(*options: str, code: str) -> int:
    return start(parse([*options, "--", "-c", code], "launch"), "launch")


def test_a_signal_after_the_plan_ends_the_launch(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    conclude = Plan.conclude

    def interrupted(self: Plan, outcome: Outcome, program: str) -> str | None:
        line = conclude(self, outcome, program)
        os.kill(os.getpid(), signal.SIGTERM)
        return line

    monkeypatch.setattr(Plan, "conclude", interrupted)
    assert launch("--processes", "1", "--restarts", "5", code=FAILS) == 3
    assert capfd.readouterr().out == "[0] start 0\n"


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


def test_no_roll_call_ends_the_launch_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch("--start-timeout", "0.5", code="import time; time.sleep(100)") == 2
    stdout, stderr = capfd.readouterr()
    assert stdout == "" and stderr == (
        "launch: error: process 0 has not called jaxcomm.launch.initialize(), or "
        "jax.distributed.initialize(), within 0.5 s; call it at the start of the script, or raise "
        "--start-timeout.\n"
    )
    alone = ("--processes", "1", "--start-timeout", "0.2")
    assert launch(*alone, code="import time; time.sleep(0.6)") == 0
