"""`launch` is an alias of `python -m jaxcomm.launch`; these tests start no process."""

import re

import pytest

from experiments.__main__ import COMMANDS
from experiments.cli.configs import Launch
from experiments.cli.errors import ExperimentError
from experiments.cli.launch import check, main
from experiments.cli.parse import parse
from experiments.training import cluster
from jaxcomm.launch import _command_line


def read(arguments: str) -> Launch:
    command, config = parse(COMMANDS, arguments.split())
    assert command == "launch"
    return config


def test_the_command_of_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(_command_line, "start", lambda *arguments: asked.append(arguments) or 7)
    config = read("launch --processes 4 --start-timeout 9 -- train --method qsgd --bits 4")
    assert main(config) == 7
    ((options, program, environment),) = asked
    train = ("-m", "experiments", "train", "--method", "qsgd", "--bits", "4", "--distributed")
    assert options.command == (*train, "--start-timeout", "9.0")
    assert options.processes == 4 and program == "experiments"
    assert environment["EXPERIMENTS_COMMAND"].startswith("python -m experiments")
    assert check(("train", "--distributed")) == ["train", "--distributed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("launch", "launch needs a command after its options"),
        ("launch -- digits", "invalid choice: 'digits'"),
        ("launch -- train --steps 0", "--steps: must be an integer of at least 1"),
        ("launch -- train --devices 2", "--devices cannot be used under `launch`"),
    ],
)
def test_errors_are_raised_before_any_process_starts(arguments: str, message: str) -> None:
    with pytest.raises(ExperimentError, match=re.escape(message)):
        main(read(arguments))


def test_an_invalid_address_of_the_coordinator_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("COORDINATOR_ADDRESS", "host"),
        ("NUM_PROCESSES", "2"),
        ("PROCESS_ID", "1"),
    ):
        monkeypatch.setenv(f"JAX_{name}", value)
    with pytest.raises(ExperimentError, match=r"^[^\n]* must be HOST:PORT, got 'host'[^\n]*$"):
        cluster.initialize(1.0)
