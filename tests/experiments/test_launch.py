"""`launch` is an alias of `python -m jaxcomm.launch`; this test starts no process."""

import pytest

from experiments.__main__ import COMMANDS
from experiments.cli.launch import check, main
from experiments.cli.parse import parse
from jaxcomm.launch import _command_line


def test_the_command_of_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(_command_line, "start", lambda *arguments: asked.append(arguments) or 7)
    arguments = "launch --processes 4 --start-timeout 9 -- train --method qsgd --bits 4"
    command, config = parse(COMMANDS, arguments.split())
    assert command == "launch" and main(config) == 7
    ((options, program, environment),) = asked
    train = ("-m", "experiments", "train", "--method", "qsgd", "--bits", "4", "--distributed")
    assert options.command == (*train, "--start-timeout", "9.0")
    assert options.processes == 4 and program == "experiments"
    assert environment["EXPERIMENTS_COMMAND"].startswith("python -m experiments")
    assert check(("train", "--distributed")) == ["train", "--distributed"]
