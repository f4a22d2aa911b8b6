"""`train --distributed`, with and without `jaxcomm.launch`, as a user runs it."""

import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from experiments.study.record import of_kind, read, read_environment, read_settings
from tests.processes.running import finish, free_address, start

pytestmark = pytest.mark.xdist_group("processes")

SMALL = ["--batch", "64", "--log-every", "4"]
ENDLESS = [*SMALL, "--steps", "1000000"]


def experiments(*arguments: str, **environment: Any) -> "subprocess.Popen[str]":
    return start("-m", "experiments", *arguments, **environment)


def launched(*arguments: str, processes: int = 2, devices: int = 1) -> "subprocess.Popen[str]":
    options = ["--processes", str(processes), "--devices-per-process", str(devices)]
    command = ["-m", "experiments", *arguments, "--distributed"]
    return start("-m", "jaxcomm.launch", *options, "--", *command)


def wait_for(process: subprocess.Popen, beginning: str) -> None:
    for line in process.stdout:
        if line.startswith(beginning):
            return
    raise AssertionError(f"ended without {beginning!r}: {process.stderr.read()}")


@pytest.mark.slow
def test_two_processes_equal_one_with_all_devices(tmp_path: Path) -> None:
    train = ["train", *SMALL, "--steps", "8", "--record", "run", "--records"]
    code, stdout, stderr = finish(launched(*train, str(tmp_path / "two"), devices=2))
    assert (code, stderr) == (0, "")
    assert "4 workers on cpu, 2 processes" in stdout
    assert all(line.startswith("[0] ") for line in stdout.splitlines())  # The first alone speaks.
    assert finish(experiments(*train, str(tmp_path / "one"), "--devices", "4"))[0] == 0
    (two,) = (tmp_path / "two").iterdir()  # The first alone keeps a record.
    (one,) = (tmp_path / "one").iterdir()
    config, environment = read_settings(two), read_environment(two)
    assert config["finished"] and config["distributed"]
    assert "command: python -m experiments train --batch 64" in environment
    assert "processes: 2" in environment and "devices: 4 x cpu" in environment
    for row, expected in zip(read(two), read(one), strict=True):
        for name in expected.keys() - {"step_milliseconds"}:
            value = expected[name]
            assert row[name] == (
                pytest.approx(value, rel=1e-3) if isinstance(value, float) else value
            )


@pytest.mark.slow
def test_wall_clock_windows_over_processes(tmp_path: Path) -> None:
    few = ["--seeds", "2", "--windows", "8", "--minibatch-seconds", "0.05"]
    arguments = [*few, "--deadline-slack", "1.2", "--records", str(tmp_path)]
    code, _, stderr = finish(launched("pace", *arguments))
    assert (code, stderr) == (0, "")
    (folder,) = tmp_path.iterdir()
    assert read_settings(folder)["finished"]
    by_strategy = {(row["clock"], row["strategy"]): row for row in of_kind(read(folder), "run")}
    assert len(by_strategy) == 4
    waiting, other = (by_strategy["wall", name] for name in ("synchronous", "non_blocking"))
    assert waiting["minibatches"] == 2 * 4 * 8
    # In 16 windows, the one fast worker does all four and the slow one does one.
    assert 16 * 4 <= other["minibatches"] <= 16 * 6
    assert other["seconds"] < waiting["seconds"]


@pytest.mark.slow
def test_a_signal_leaves_a_valid_partial_record(tmp_path: Path) -> None:
    keep = ["--records", str(tmp_path), "--record", "stopped"]
    launcher = launched("train", *ENDLESS, *keep)
    wait_for(launcher, "[0] step 4:")
    launcher.send_signal(signal.SIGINT)
    code, _, stderr = finish(launcher)
    (folder,) = tmp_path.iterdir()
    assert code == 128 + signal.SIGINT
    lines = stderr.splitlines()  # JAX may say that it has lost process 0.
    assert f"[0] experiments: interrupted: {folder} is a partial record." in lines
    assert "SIGINT has stopped all processes." in lines[-1]
    rows = read(folder)
    assert not read_settings(folder)["finished"]
    assert rows and all(row["kind"] == "point" for row in rows)


@pytest.mark.slow
def test_an_incomplete_cluster_is_an_error() -> None:
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
