"""Parses arguments into a config. Does not import JAX, whose settings depend on the arguments."""

import argparse
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from experiments.cli.errors import ExperimentError


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


def _split_remaining(
    commands: Mapping[str, type], arguments: Sequence[str]
) -> tuple[Sequence[str], dict[str, Any]]:
    """The arguments that `parse` reads, and those that a field of the config takes unparsed."""
    config = commands.get(arguments[0]) if arguments else None
    fields = dataclasses.fields(config) if config else ()
    remaining_fields = [field for field in fields if "remaining" in field.metadata]
    if not remaining_fields:
        return arguments, {}
    return arguments[:1], {remaining_fields[0].name: tuple(arguments[1:])}


def parse(commands: Mapping[str, type], arguments: Sequence[str]) -> tuple[str, Any]:
    """The command and its config.

    Args:
      commands: The dataclass of each command's config.
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
    for command, config in commands.items():
        text = inspect.getdoc(config) or ""
        subparser = subparsers.add_parser(
            command,
            help=text.splitlines()[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for field in dataclasses.fields(config):
            _add_field(subparser, field)
    arguments, remaining = _split_remaining(commands, arguments)
    values = vars(parser.parse_args(arguments))
    command = values.pop("command")
    values = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    return command, commands[command](**values, **remaining)
