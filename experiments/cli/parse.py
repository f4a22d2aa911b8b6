"""Parses arguments into a config. Does not import JAX, whose settings depend on the arguments."""

import argparse
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from experiments.cli.errors import ExperimentError


class Command(NamedTuple):
    """A command.

    Attributes:
      summary: Its line in the list of commands.
      config: Returns the dataclass of its options.
    """

    summary: str
    config: Callable[[], type]


def first_line(config: type) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(config) or "").partition("\n")[0]


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        raise ExperimentError(message)


def _describe(default: object) -> str:
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
    return "" if default is None else f" (default: {shown})"


def _add_field(parser: argparse.ArgumentParser, field: dataclasses.Field) -> None:
    if settings := field.metadata.get("argument"):
        parser.add_argument(field.name, help=settings["help"])
    if settings := field.metadata.get("flag"):
        parser.add_argument(
            "--" + field.name.replace("_", "-"), action="store_true", help=settings["help"]
        )
    if settings := field.metadata.get("option"):
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            default=field.default,
            type=settings["type"],
            choices=settings["choices"],
            nargs="+" if settings["many"] else None,
            help=(settings["help"] + _describe(field.default)).replace("%", "%%"),
        )


def parse(commands: Mapping[str, Command], arguments: Sequence[str]) -> tuple[str, Any]:
    """The command and its config.

    Args:
      commands: The commands. Only the config of the command in `arguments` is loaded.
      arguments: The arguments after the name of the program.

    Raises:
      ExperimentError: If an argument is unknown, missing or not allowed.
    """
    parser = _Parser(
        prog="python -m experiments",
        description="Runs on fake CPU devices unless JAX_PLATFORMS names another backend.",
        allow_abbrev=False,
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    remaining = {}
    for name, command in commands.items():
        config = command.config() if [*arguments[:1]] == [name] else None
        subparser = subparsers.add_parser(
            name,
            help=command.summary,
            description=inspect.getdoc(config) if config else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for field in dataclasses.fields(config) if config else ():
            if "remaining" in field.metadata:  # Takes all further arguments unparsed.
                remaining[field.name] = tuple(arguments[1:])
                arguments = arguments[:1]
            else:
                _add_field(subparser, field)
    values = vars(parser.parse_args(arguments))
    name = values.pop("command")
    values = {
        option: tuple(value) if isinstance(value, list) else value
        for option, value in values.items()
    }
    return name, commands[name].config()(**values, **remaining)
