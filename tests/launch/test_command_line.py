"""The command line of `python -m jaxcomm.launch`, and what it tells each process."""

import re
from pathlib import Path

import pytest

from jaxcomm.launch import _command_line
from jaxcomm.launch._address import Address
from jaxcomm.launch._command_line import environments_of, find_port, main
from jaxcomm.launch._messages import explain
from jaxcomm.launch._options import LaunchOptions, parse
from jaxcomm.launch._processes import Outcome


def read(arguments: str) -> LaunchOptions:
    return parse(arguments.split(), "launch")


def test_everything_after_the_dashes_is_the_command() -> None:
    options = read("--processes 4 --port 7 -- train.py --method qsgd -- --help")
    assert options.processes == 4 and options.port == 7 and options.devices_per_process == 1
    assert options.coordinator_address == "127.0.0.1"
    assert options.command == ("train.py", "--method", "qsgd", "--", "--help")


MISTAKES = [
    ("", "launch needs a command after its options and `--`"),
    ("train.py --steps 3", "unrecognized arguments: train.py --steps 3"),
    ("--processes 0 -- x", "--processes: must be an integer of at least 1 and at most 65536"),
    ("--processes two -- x", "--processes: must be an integer of at least 1"),
    ("--processes 99999999999 -- x", "--processes: must be an integer of at least 1"),
    (f"--processes {'9' * 5000} -- x", f"got '{'9' * 40}'... of 5000 characters"),
    ("--port 65536 -- x", "--port: must be an integer from 0 to 65535, got '65536'"),
    ("--start-timeout 0 -- x", "--start-timeout: must be a number above 0"),
    ("--start-timeout 1e10 -- x", "above 0 and at most 604800, a week, got '1e10'"),
    ("--start-timeout nan -- x", "--start-timeout: must be a number above 0"),
    ("--heartbeat-timeout 0 -- x", "--heartbeat-timeout: must be an integer of at least 1"),
    ("--heartbeat-timeout 0.5 -- x", "at least 1 and at most 604800, a week, got '0.5'"),
    ("--grace 0 -- x", "--grace: must be a number above 0"),
    ("--restarts -1 -- x", "--restarts: must be an integer from 0 to 65536, got '-1'"),
    ("--restarts 1 --min-processes 3 -- x", "--min-processes must be at most --processes, 2, got"),
    ("--min-processes 1 -- x", "--min-processes and --available need --restarts of at least 1"),
    ("--available file -- x", "--min-processes and --available need --restarts of at least 1"),
    ("--restarts 1 --available no_such_file -- -c 1", "'no_such_file' cannot be read: No such"),
    ("--coordinator-address a/b -- x", "must be the name or address of a host, got 'a/b'"),
    ("--coordinator-address a..b -- x", "must be the name or address of a host, got 'a..b'"),
    ("--devices 2 -- x", "unrecognized arguments: --devices 2"),
    ("--", "needs a command after --"),
    ("-- no_such_script.py", "there is no script 'no_such_script.py': write a script, or -m"),
    ("--coordinator-address 192.0.2.1 -- -c 1", "cannot listen at 192.0.2.1:0: Cannot assign"),
    ("--coordinator-address no-such-host.invalid -- -c 1", "cannot listen at no-such-host.inv"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_what_is_wrong_is_one_line_before_anything_starts(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and stderr.startswith("jaxcomm.launch: error: ")
    assert message in stderr and stderr.count("\n") == 1 and len(stderr) < 300


def test_help_is_of_the_launcher_only_before_the_dashes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0 and "--devices-per-process" in capsys.readouterr().out
    assert read("-- train.py --help").command == ("train.py", "--help")


def test_the_port_is_free_or_the_one_asked_for() -> None:
    found = find_port(read("-- x"))
    assert found.host == "127.0.0.1" and found.port > 0
    assert find_port(read(f"--port {found.port} -- x")) == found


def test_what_each_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_command_line, "find_port", lambda options: Address("127.0.0.1", 7))
    given = {
        "HOME": "/root",
        "JAX_PLATFORMS": "cuda",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    options = read("--processes 3 --devices-per-process 2 --start-timeout 9 -- x")
    *_, told = environments_of(options, given)
    token = told.pop("JAXCOMM_TOKEN")
    assert re.fullmatch("[0-9a-f]{32}", token)
    assert told == {
        "HOME": "/root",
        "JAX_PLATFORMS": "cuda",
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:7",
        "JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:7",
        "JAX_NUM_PROCESSES": "3",
        "JAX_PROCESS_ID": "2",
        "JAX_LOCAL_DEVICE_IDS": "4,5",
        "JAXCOMM_START_TIMEOUT": "9",
        "JAXCOMM_HEARTBEAT_TIMEOUT": "20",
        "NPROC": "16",
        "XLA_FLAGS": f"{given['XLA_FLAGS']} --xla_force_host_platform_device_count=2",
    }
    again = environments_of(options, {**given, "NPROC": "3", "JAXCOMM_TOKEN": "old"})
    assert {each["NPROC"] for each in again} == {"3"}
    tokens = {each["JAXCOMM_TOKEN"] for each in again}
    assert len(tokens) == 1 and tokens.isdisjoint({token, "old"})


@pytest.mark.parametrize(
    ("outcome", "line"),
    [
        (Outcome(0), None),
        (Outcome(130, signal=2), "interrupted: SIGINT has stopped all processes."),
        (Outcome(2, failed=1, explained=True), None),
        (Outcome(1, failed=1), "error: process 1 of 4 has ended with exit code 1; the others were"),
        (Outcome(139, failed=3, signal=11), "error: process 3 of 4 has ended with signal SIGSEGV;"),
        (Outcome(2, reason="why"), "error: why."),
        (Outcome(147, failed=1, signal=19), "error: process 1 of 4 was stopped (SIGSTOP) and did"),
        (Outcome(168, failed=0, signal=40), "error: process 0 of 4 has ended with signal 40; the"),
    ],
)
def test_what_no_process_has_said_the_launcher_says(outcome: Outcome, line: str | None) -> None:
    said = explain(outcome, 4)
    assert said is None if line is None else said is not None and said.startswith(line)
    if outcome.code:
        assert str(explain(outcome, 4, "/steps/7")).endswith("the newest checkpoint is /steps/7.")


def test_the_exit_code_is_that_of_the_first_that_failed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nprint(sys.argv[1:])\nsys.exit(7 * (os.environ['JAX_PROCESS_ID'] == '1'))"
    )
    assert main(["--", str(script), "--processes", "x"]) == 7
    stdout, stderr = capfd.readouterr()
    assert "[1] ['--processes', 'x']" in stdout.splitlines()
    assert stderr == (
        "jaxcomm.launch: error: process 1 of 2 has ended with exit code 7; the others were "
        "stopped.\n"
    )
