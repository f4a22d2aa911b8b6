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
        ("launch --processes 0 -- train", "--processes: must be at least 1, got '0'"),
        ("launch -- tain", "invalid choice: 'tain'"),
        ("launch -- digits", "invalid choice: 'digits'"),
        ("launch -- launch -- train", "invalid choice: 'launch'"),
        ("launch -- train --steps 0", "--steps: must be an integer of at least 1"),
        ("launch -- train --bitz 8", "unrecognized arguments: --bitz 8"),
        ("launch -- train --devices 2", "--devices cannot be used under `launch`"),
    ],
)
def test_errors_are_raised_before_any_process_starts(arguments: str, message: str) -> None:
    with pytest.raises(ExperimentError, match=re.escape(message)):
        main(read(arguments))


@pytest.mark.parametrize(
    ("arguments", "option"),
    [("launch --help", "--devices-per-process"), ("launch -- train --help", "--learning-rate")],
)
def test_help_is_that_of_the_preceding_command(
    arguments: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(read(arguments))
    assert ended.value.code == 0 and option in capsys.readouterr().out


def test_other_commands_take_no_dashes() -> None:
    with pytest.raises(ExperimentError, match="unrecognized arguments"):
        parse(COMMANDS, ["train", "--", "x"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "host"}, "must be HOST:PORT, got 'host'"),
        ({"JAX_NUM_PROCESSES": "two"}, "must be an integer, got 'two'"),
    ],
)
def test_invalid_settings_of_a_process_are_one_line(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], message: str
) -> None:
    right = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_NUM_PROCESSES": "2"}
    for name, value in {**right, "JAX_PROCESS_ID": "1", **settings}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ExperimentError, match=re.escape(message)) as error:
        cluster.initialize(1.0)
    assert len(str(error.value)) < 300 and "\n" not in str(error.value)
