"""Starting again after a failure: how many, from where, and what is said. None needs JAX."""

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxcomm.launch import LaunchError
from jaxcomm.launch._available import GROW, GrowthWatch, read_available
from jaxcomm.launch._command_line import environments_of, main
from jaxcomm.launch._options import parse
from jaxcomm.launch._processes import Outcome
from jaxcomm.launch._restarts import Restarts
from jaxcomm.launch._run_directory import (
    PREEMPTED,
    RUN_DIRECTORY,
    STARTED,
    RunDirectory,
    report,
    report_checkpoint,
    run_directory,
)

KILLED = Outcome(137, failed=2, signal=9)


def plan_of(arguments: str, directory: Path) -> Restarts:
    return Restarts(parse(f"{arguments} -- x".split(), "launch"), RunDirectory(directory))


def test_the_directory_is_private_and_only_process_0_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with run_directory() as directory:
        assert directory.path.stat().st_mode & 0o777 == 0o700
        report_checkpoint("nowhere")  # Without a launcher.
        monkeypatch.setenv(RUN_DIRECTORY, str(directory.path))
        monkeypatch.setenv("JAX_PROCESS_ID", "1")
        report_checkpoint("of/another")
        report(STARTED)
        assert directory.checkpoint() is None and not directory.has(STARTED)
        monkeypatch.setenv("JAX_PROCESS_ID", "0")
        report(STARTED)
        report_checkpoint("steps/1")
        first = directory.checkpoint_version()
        report_checkpoint("steps/1")
        assert directory.checkpoint() == str(Path.cwd() / "steps" / "1")
        assert directory.checkpoint_version() != first and directory.has(STARTED)
        directory.forget_start()
        assert directory.checkpoint() and not directory.has(STARTED)
    assert not directory.path.exists()
    report_checkpoint("steps/2")  # The launcher has ended.


def test_all_start_again_while_restarts_are_left(tmp_path: Path) -> None:
    plan = plan_of("--processes 4 --restarts 2", tmp_path)
    (tmp_path / STARTED).touch()
    assert plan.conclude(KILLED, "launch") == (
        "launch: process 2 of 4 has ended with signal SIGKILL; 4 start again without a checkpoint "
        "(restart 1 of 2)."
    )
    (tmp_path / "checkpoint").write_text("/steps/7\n")
    assert "4 start again from the checkpoint /steps/7 (restart 2 of 2)." in str(
        plan.conclude(KILLED, "launch")
    )
    assert plan.starts_again and plan.starts == 2
    assert plan.conclude(KILLED, "launch") == (
        "launch: error: process 2 of 4 has ended with signal SIGKILL; the others were stopped; the "
        "newest checkpoint is /steps/7."
    )
    assert not plan.starts_again and plan.code_of(KILLED) == 137


def test_the_user_and_success_end_all(tmp_path: Path) -> None:
    plan = plan_of("--processes 4 --restarts 2", tmp_path)
    for outcome in (
        Outcome(0),
        Outcome(143, signal=15),
        Outcome(2, reason="no roll call"),
        KILLED._replace(interrupted=signal.SIGTERM),
    ):
        plan.conclude(outcome, "launch")
        assert not plan.starts_again
    growing = Outcome(143, reason=GROW, interrupted=signal.SIGINT)
    assert (
        plan.conclude(growing, "launch") == "launch: interrupted: SIGINT has stopped all processes."
    )
    assert not plan.starts_again and plan.code_of(growing) == 130


def test_a_preempted_run_starts_again_or_has_the_code_of_sigterm(tmp_path: Path) -> None:
    (tmp_path / PREEMPTED).touch()
    plan = plan_of("--processes 4", tmp_path)
    assert "interrupted: SIGTERM has stopped all" in str(plan.conclude(Outcome(0), "launch"))
    assert not plan.starts_again and plan.code_of(Outcome(0)) == 143
    plan = plan_of("--processes 4 --restarts 1", tmp_path)
    assert "a process has received SIGTERM and all have ended; 4 start again" in str(
        plan.conclude(Outcome(0), "launch")
    )


def test_a_slot_that_cannot_start_is_left_out(tmp_path: Path) -> None:
    plan = plan_of("--processes 4 --restarts 9 --min-processes 2 --devices-per-process 2", tmp_path)
    plan.conclude(KILLED, "launch")
    assert plan.slots == [0, 1, 2, 3]  # It may have been an accident.
    plan.conclude(KILLED, "launch")
    assert plan.slots == [0, 1, 3]
    options = parse(["--processes", "4", "--devices-per-process", "2", "--", "x"], "launch")
    environments = environments_of(options, {}, plan.slots)
    assert [each["JAX_PROCESS_ID"] for each in environments] == ["0", "1", "2"]
    assert environments[2]["JAX_LOCAL_DEVICE_IDS"] == "6,7"
    assert {each["JAX_NUM_PROCESSES"] for each in environments} == {"3"}
    for _ in range(4):  # Failures that tell of others, or of the last one; 2 are the least.
        plan.conclude(Outcome(2, failed=0, explained=True), "launch")
    assert plan.slots == [0, 1]
    (tmp_path / STARTED).touch()
    plan.conclude(Outcome(1, failed=1), "launch")
    assert plan.slots == [0, 1] and plan.starts_again


def test_fewer_start_if_fewer_are_available(tmp_path: Path) -> None:
    file = tmp_path / "available"
    file.write_text("4")
    plan = plan_of(f"--processes 4 --restarts 9 --min-processes 2 --available {file}", tmp_path)
    file.write_text("3\n")
    assert "3 start again" in str(plan.conclude(KILLED, "launch")) and plan.slots == [0, 1, 2]
    file.write_text("1")
    assert plan.conclude(KILLED, "launch") == (
        "launch: error: process 2 of 3 has ended with signal SIGKILL; only 1 of 4 processes can "
        "start and --min-processes is 2."
    )
    assert not plan.starts_again
    with pytest.raises(LaunchError, match="only 1 of 4 processes can start and --min-processes is"):
        plan_of(f"--processes 4 --restarts 9 --min-processes 2 --available {file}", tmp_path)


def test_more_start_at_the_next_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxcomm.launch._available.READ_SECONDS", 0)
    file, checkpoint = tmp_path / "available", tmp_path / "checkpoint"
    file.write_text("2")
    checkpoint.write_text("/steps/1")
    watch = GrowthWatch(file, 2, 2, 4, RunDirectory(tmp_path))

    def save(step: int) -> None:
        (tmp_path / "new").write_text(f"/steps/{step}")
        (tmp_path / "new").replace(checkpoint)

    assert watch() is None
    save(2)
    assert watch() is None
    file.write_text("3")
    assert watch() is None
    file.write_text("")  # It is being written.
    assert watch() is None
    file.write_text("5")
    assert watch() is None
    save(3)
    assert watch() == Outcome(143, reason=GROW)
    full = GrowthWatch(file, 4, 4, 4, RunDirectory(tmp_path))
    full()
    save(4)
    assert full() is None  # No more than --processes.


@pytest.mark.parametrize("text", ["", "-1", "two", "9" * 5000])
def test_a_file_that_is_not_a_number(tmp_path: Path, text: str) -> None:
    (tmp_path / "available").write_text(text)
    with pytest.raises(LaunchError, match="must be an integer from 0 to 65536, got") as told:
        read_available(tmp_path / "available")
    assert len(str(told.value)) < 300
    with pytest.raises(LaunchError, match="cannot be read: No such file"):
        read_available(tmp_path / "none")


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        (tmp_path / "script.py").write_text(f"import os, sys, time\n{text}\n")
        return str(tmp_path / "script.py")

    return write


def test_a_launch_starts_again(
    script: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    path = script(
        "restart, process = os.environ['JAXCOMM_RESTARTS'], os.environ['JAX_PROCESS_ID']\n"
        "print('port', os.environ['JAX_COORDINATOR_ADDRESS'], os.environ['JAXCOMM_TOKEN'])\n"
        "sys.exit(7 if restart == '0' and process == '1' else 0)"
    )
    assert main(["--restarts", "1", "--", path]) == 0
    stdout, stderr = capfd.readouterr()
    assert stderr == (
        "jaxcomm.launch: process 1 of 2 has ended with exit code 7; 2 start again without a "
        "checkpoint (restart 1 of 1).\n"
    )
    assert len(set(re.findall(r"port \S+ (\S+)", stdout))) == 2  # A new token for each start.


def test_a_launch_goes_on_without_a_slot_that_cannot_start(
    script: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    path = script(
        "slot, processes = os.environ['JAX_LOCAL_DEVICE_IDS'], os.environ['JAX_NUM_PROCESSES']\n"
        "print('of', processes)\n"
        "time.sleep(0.3)\n"
        "sys.exit(5 if slot == '1' else 0)"
    )
    options = ["--processes", "3", "--restarts", "3", "--min-processes", "2", "--", path]
    assert main(options) == 0
    stdout, stderr = capfd.readouterr()
    again = [re.search(r"(\d) start again", line) for line in stderr.splitlines()]
    assert [found and found[1] for found in again] == ["3", "2"]
    assert stdout.count("of 2") == 2


@pytest.mark.slow
def test_a_script_that_never_joins_is_ended(
    script: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    path = script("time.sleep(100)")
    assert main(["--start-timeout", "0.5", "--", path]) == 2
    assert capfd.readouterr().err == (
        "jaxcomm.launch: error: process 0 has not called jaxcomm.launch.initialize(), or "
        "jax.distributed.initialize(), within 0.5 s; call it at the start of the script, or raise "
        "--start-timeout.\n"
    )
    assert main(["--processes", "1", "--start-timeout", "0.1", "--", script("time.sleep(1)")]) == 0
    joins = (
        "if os.environ['JAX_PROCESS_ID'] == '0':\n"
        "    host, port = os.environ['JAX_COORDINATOR_ADDRESS'].split(':')\n"
        "    import socket; server = socket.create_server((host, int(port)))\n"
        "time.sleep(2)"
    )
    assert main(["--start-timeout", "1", "--", script(joins)]) == 0
