"""`launch` is a name for `python -m jaxcomm.launch`; nothing is started here."""

import re

import pytest

from experiments.__main__ import COMMANDS
from experiments.command_line import parse
from experiments.configs import Launch
from experiments.errors import ExperimentError
from experiments.launch import check, main
from jaxcomm import launch


def read(arguments: str) -> Launch:
    command, config = parse(COMMANDS, arguments.split())
    assert command == "launch"
    return config


def test_what_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(launch, "start", lambda *arguments: asked.append(arguments) or 7)
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
        ("launch", "launch needs a command after its options and `--`"),
        ("launch --processes 0 -- train", "--processes: must be an integer of at least 1"),
        ("launch --coordinator-address a..b -- train", "must be a name or address of a host"),
        ("launch --start-timeout 1e10 -- train", "at most 604800, a week, got '1e10'"),
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


@pytest.mark.parametrize(
    ("arguments", "option"),
    [("launch --help", "--devices-per-process"), ("launch -- train --help", "--learning-rate")],
)
def test_help_is_of_what_it_stands_behind(
    arguments: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(read(arguments))
    assert ended.value.code == 0 and option in capsys.readouterr().out


def test_other_commands_take_no_dashes() -> None:
    with pytest.raises(ExperimentError, match="unrecognized arguments"):
        parse(COMMANDS, ["train", "--", "x"])
