"""`launch` and `train --distributed` as a user runs them."""

import json
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.processes.running import finish, free_address, start

pytestmark = pytest.mark.xdist_group("processes")

SMALL = ["--batch", "64", "--log-every", "4"]
ENDLESS = [*SMALL, "--steps", "1000000"]


def experiments(*arguments: str, **environment: Any) -> "subprocess.Popen[str]":
    return start("-m", "experiments", *arguments, **environment)


def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
    return finish(experiments(*arguments, **environment))


def wait_for(process: subprocess.Popen, beginning: str) -> None:
    for line in process.stdout:
        if line.startswith(beginning):
            return
    raise AssertionError(f"ended without {beginning!r}: {process.stderr.read()}")


def read(folder: Path) -> tuple[dict, list[dict], str]:
    rows = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return (
        json.loads((folder / "config.json").read_text(encoding="utf-8")),
        [json.loads(row) for row in rows],
        (folder / "environment.txt").read_text(encoding="utf-8"),
    )


@pytest.mark.slow
def test_two_processes_of_two_devices_are_four_devices_of_one(tmp_path: Path) -> None:
    train = ["train", *SMALL, "--steps", "8", "--record", "run", "--records"]
    shape = ["--processes", "2", "--devices-per-process", "2"]
    code, stdout, stderr = run("launch", *shape, "--", *train, str(tmp_path / "two"))
    assert (code, stderr) == (0, "")
    assert "4 workers on cpu, 2 processes" in stdout
    assert all(line.startswith("[0] ") for line in stdout.splitlines())  # The first alone speaks.
    assert run(*train, str(tmp_path / "one"), "--devices", "4")[0] == 0
    (two,) = (tmp_path / "two").iterdir()  # The first alone keeps a record.
    (one,) = (tmp_path / "one").iterdir()
    config, rows, environment = read(two)
    assert config["finished"] and config["distributed"]
    assert "command: python -m experiments launch --processes 2" in environment
    assert "processes: 2" in environment and "devices: 4 x cpu" in environment
    for row, expected in zip(rows, read(one)[1], strict=True):
        for name in expected.keys() - {"step_milliseconds"}:
            value = expected[name]
            assert row[name] == (
                pytest.approx(value, rel=1e-3) if isinstance(value, float) else value
            )


@pytest.mark.slow
def test_windows_by_the_clock_on_the_wall_over_processes(tmp_path: Path) -> None:
    few = ["--repeats", "2", "--windows", "8", "--loss", "3"]
    few += ["--minibatch-seconds", "0.05", "--deadline-slack", "1.2"]
    arguments = [*few, "--log-every", "2", "--records", str(tmp_path)]
    code, _, stderr = run("launch", "--processes", "2", "--", "pace", *arguments)
    assert (code, stderr) == (0, "")
    (folder,) = tmp_path.iterdir()
    config, rows, _ = read(folder)
    assert config["finished"]
    by_strategy = {(row["clock"], row["strategy"]): row for row in rows if row["kind"] == "run"}
    assert len(by_strategy) == 4
    waiting, other = (by_strategy["wall", name] for name in ("synchronous", "non_blocking"))
    assert waiting["minibatches"] == 2 * 4 * 8
    # In 16 windows, the one fast worker does all four and the slow one does one.
    assert 16 * 4 <= other["minibatches"] <= 16 * 6
    assert other["seconds"] < waiting["seconds"]


@pytest.mark.slow
def test_a_signal_leaves_a_valid_partial_record(tmp_path: Path) -> None:
    keep = ["--records", str(tmp_path), "--record", "stopped"]
    launcher = experiments("launch", "--", "train", *ENDLESS, *keep)
    wait_for(launcher, "[0] step 4:")
    launcher.send_signal(signal.SIGINT)
    code, _, stderr = finish(launcher)
    (folder,) = tmp_path.iterdir()
    assert code == 128 + signal.SIGINT
    lines = stderr.splitlines()  # JAX may say that it has lost process 0.
    assert f"[0] experiments: interrupted: {folder} is a partial record." in lines
    assert lines[-1] == "experiments: interrupted: SIGINT has stopped all processes."
    config, rows, _ = read(folder)
    assert not config["finished"] and rows and all(row["kind"] == "point" for row in rows)


@pytest.mark.slow
def test_a_cluster_that_cannot_come_together() -> None:
    """Without a launcher, as under a cluster's own manager; all at once, since each takes long."""
    disagreed = free_address()
    taken = socket.create_server(("127.0.0.1", 0))
    in_use = f"127.0.0.1:{taken.getsockname()[1]}"
    attempts = [
        ("the port is in use; choose another", in_use, 2, 0),
        ("process 1 of 2 could not join all others at", free_address(), 2, 1),
        ("process 0 of 2 could not join all others at", free_address(), 2, 0),
        ("process 1 of 3 has joined 2 processes: set JAX_NUM_PROCESSES", disagreed, 3, 1),
        ("", disagreed, 2, 0),
    ]
    started = [
        experiments(
            "train",
            "--distributed",
            "--start-timeout",
            "60" if address == disagreed else "2",
            JAX_COORDINATOR_ADDRESS=address,
            JAX_NUM_PROCESSES=str(processes),
            JAX_PROCESS_ID=str(process),
        )
        for _, address, processes, process in attempts
    ]
    with taken:
        for (message, *_), process in zip(attempts, started, strict=True):
            code, stdout, stderr = finish(process)
            if message:
                assert (code, stdout) == (2, "")
                assert "error: " in stderr and stderr.count("\n") == 1 and message in stderr
            else:  # It has lost the other.
                assert code != 0
