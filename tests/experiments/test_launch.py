"""The command line of `launch`, and what it tells each process; nothing is started here."""

import re

import pytest

from experiments.__main__ import COMMANDS
from experiments.command_line import parse
from experiments.configs import Launch
from experiments.errors import ExperimentError
from experiments.launch import check, environment_of, explain, find_port, main
from experiments.processes import Outcome
from experiments.roll_call import Address


def read(arguments: str) -> Launch:
    command, config = parse(COMMANDS, arguments.split())
    assert command == "launch"
    return config


def test_everything_after_the_dashes_is_the_command() -> None:
    config = read("launch --processes 4 --port 7 -- train --method qsgd --bits 4")
    assert config.processes == 4 and config.port == 7 and config.devices_per_process == 1
    assert config.coordinator_address == "127.0.0.1"
    assert config.command == ("train", "--method", "qsgd", "--bits", "4")
    assert check(config.command) == [*config.command, "--distributed"]
    assert check(("train", "--distributed")) == ["train", "--distributed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("launch", "launch needs a command after its options and `--`"),
        ("launch train --steps 3", "launch needs a command after its options and `--`"),
        (
            "launch --processes 0 -- train",
            "--processes: must be an integer of at least 1 and below 2**31, got '0'",
        ),
        ("launch --processes two -- train", "--processes: must be an integer of at least 1"),
        ("launch --port 65536 -- train", "--port: must be an integer from 0 to 65535"),
        ("launch --start-timeout 0 -- train", "--start-timeout: must be a number above 0"),
        ("launch --coordinator-address a/b -- train", "must be a name or address of a host"),
        ("launch --devices 2 -- train", "unrecognized arguments: --devices 2"),
        ("launch --", "needs a command after --"),
        ("launch -- tain", "invalid choice: 'tain'"),
        ("launch -- compare", "invalid choice: 'compare'"),
        ("launch -- launch -- train", "invalid choice: 'launch'"),
        ("launch -- train --steps 0", "--steps: must be an integer of at least 1"),
        ("launch -- train --bitz 8", "unrecognized arguments: --bitz 8"),
        ("launch -- train --devices 2", "--devices is not for `launch`"),
        ("launch --coordinator-address 192.0.2.1 -- train", "cannot listen at 192.0.2.1:0: "),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(arguments: str, message: str) -> None:
    with pytest.raises(ExperimentError, match=re.escape(message)):
        main(read(arguments))


def test_other_commands_take_no_dashes() -> None:
    with pytest.raises(ExperimentError, match="unrecognized arguments"):
        parse(COMMANDS, ["train", "--", "x"])


def test_the_port_is_free_or_the_one_asked_for() -> None:
    found = find_port(read("launch -- train"))
    assert found.host == "127.0.0.1" and found.port > 0
    assert find_port(read(f"launch --port {found.port} -- train")) == found


def test_what_each_process_is_told() -> None:
    config = read("launch --processes 3 --devices-per-process 2 -- train")
    given = {"HOME": "/root", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    told = environment_of(2, config, Address("127.0.0.1", 7), given)
    assert told.pop("EXPERIMENTS_COMMAND").startswith("python -m experiments")
    assert told == {
        "HOME": "/root",
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:7",
        "JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:7",
        "JAX_NUM_PROCESSES": "3",
        "JAX_PROCESS_ID": "2",
        "JAX_LOCAL_DEVICE_IDS": "4,5",
        "XLA_FLAGS": f"{given['XLA_FLAGS']} --xla_force_host_platform_device_count=2",
    }


@pytest.mark.parametrize(
    ("outcome", "line"),
    [
        (Outcome(0), None),
        (Outcome(130, signal=2), None),
        (Outcome(2, failed=1, explained=True), None),
        (Outcome(1, failed=1), "process 1 of 4 has ended with exit code 1; the others were"),
        (Outcome(139, failed=3, signal=11), "process 3 of 4 has ended with signal SIGSEGV; the"),
    ],
)
def test_what_no_process_has_said_the_launcher_says(outcome: Outcome, line: str | None) -> None:
    said = explain(outcome, 4)
    assert said is None if line is None else said.startswith(line)
