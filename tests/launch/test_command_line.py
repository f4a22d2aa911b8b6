"""The command line of `python -m jaxcomm.launch`, and the environment of each process."""

import re

import pytest

from jaxcomm.launch._command_line import main, parse
from jaxcomm.launch._environment import environments_of


def test_everything_after_the_options_is_the_command() -> None:
    given = ["--processes", "4", "--", "train.py", "--processes", "2", "--", "--help"]
    options = parse(given, "launch")
    assert options.processes == options.min_processes == 4 and options.devices_per_process == 1
    assert options.command == ("train.py", "--processes", "2", "--", "--help")
    given.remove("--")  # The first is optional.
    assert parse(given, "launch") == options


MISTAKES = [
    ("", "a script is missing after the options; type: python -m jaxcomm.launch -- script.py"),
    ("--processes 4 --", "type: python -m jaxcomm.launch --processes 4 -- script.py"),
    ("--processes 4 -m train --steps 9", "launch --processes 4 -- -m train --steps 9"),
    ("-c 1", "`--` is missing before -c; type: python -m jaxcomm.launch -- -c 1"),
    ("--steps 9 train.py", "the launcher has no option --steps; those of a script follow it: "),
    ("--processes 0 -- x", "--processes: must be at least 1, got '0'"),
    ("--start-timeout nan -- x", "--start-timeout: must be at least 0, got 'nan'"),
    ("--restarts 1 --min-processes 3 -- x", "--min-processes must be at most --processes, and"),
    ("--min-processes 1 -- x", "needs --restarts of at least 1"),
]


def test_errors_are_one_line_before_any_process_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments, message in MISTAKES:
        assert main(arguments.split()) == 2
        stdout, stderr = capsys.readouterr()
        assert stdout == "" and stderr.startswith("jaxcomm.launch: error: ")
        assert message in stderr and stderr.count("\n") == 1


def test_the_environment_of_each_process() -> None:
    given = {
        "HOME": "/root",
        "JAX_PLATFORMS": "cuda",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    *_, last = environments_of([0, 1, 3], 2, given)  # Slot 2 is omitted.
    address = last["JAX_COORDINATOR_ADDRESS"]
    assert re.fullmatch(r"127\.0\.0\.1:\d+", address)
    assert last == {
        "HOME": "/root",
        "JAX_PLATFORMS": "cuda",
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_NUM_PROCESSES": "3",
        "JAX_PROCESS_ID": "2",
        "JAX_LOCAL_DEVICE_IDS": "6,7",
        "NPROC": "16",
        "XLA_FLAGS": f"{given['XLA_FLAGS']} --xla_force_host_platform_device_count=2",
    }
    assert environments_of([0], 1, {**given, "NPROC": "3"})[0]["NPROC"] == "3"
