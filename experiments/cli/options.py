"""Fields of a config that the command line can set, and parsers of their values."""

import argparse
import dataclasses
import math
from collections.abc import Callable
from typing import Any

RECORDS = "experiments/records"
MAX_DEVICES = 1024
DIGITS = 20  # Longer numbers are invalid: Python refuses to parse some of them.


def _integer(text: str, minimum: int, maximum: int, rule: str) -> int:
    value = int(text) if text.isdecimal() and len(text) <= DIGITS else -1
    if not minimum <= value <= maximum:
        shown = text if len(text) <= 2 * DIGITS else text[:DIGITS] + "..."
        raise argparse.ArgumentTypeError(f"must be an integer {rule}, got {shown!r}")
    return value


def positive_integer(text: str) -> int:
    """1, 2, ... below 2**31, the range of an int32."""
    return _integer(text, 1, 2**31 - 1, "of at least 1 and below 2**31")


def device_number(text: str) -> int:
    """1 to 1024, since each fake device has threads."""
    return _integer(text, 1, MAX_DEVICES, f"from 1 to {MAX_DEVICES}")


def natural_number(text: str) -> int:
    """0, 1, 2, ... below 2**31, the range of seeds."""
    return _integer(text, 0, 2**31 - 1, "from 0 to 2**31 - 1")


def positive_number(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def fraction(text: str) -> float:
    """A number above 0, up to 1."""
    value = positive_number(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"must be at most 1, got {text!r}")
    return value


def folder_name(text: str) -> str:
    """A name that is valid in a path, without a separator."""
    if not text or any(not (letter.isalnum() or letter in "-_.") for letter in text):
        raise argparse.ArgumentTypeError(
            f"must be of letters, digits, '-', '_' and '.' only, got {text!r}"
        )
    return text


def option(
    default: Any,
    text: str,
    parse: Callable[[str], Any] = str,
    *,
    choices: tuple[str, ...] | None = None,
    many: bool = False,
) -> Any:
    """A field that is `--its-name` on the command line.

    Args:
      default: The value without the option.
      text: The help.
      parse: Converts the argument to the value, or raises `argparse.ArgumentTypeError`.
      choices: The allowed values, if they can be listed without an import of JAX.
      many: Whether the option takes one or more arguments, which become a tuple.
    """
    settings = {"help": text, "type": parse, "choices": choices, "many": many}
    return dataclasses.field(default=default, metadata={"option": settings})


def is_allowed(field: dataclasses.Field, value: Any) -> bool:
    """Whether a value that a file holds is one that the command line could have set."""
    if type(value) is type(field.default) and value == field.default:
        return True
    settings = field.metadata.get("option")
    if settings is None:
        return type(value) is type(field.default)
    if settings["many"] != isinstance(value, tuple):
        return False
    try:
        each = value if settings["many"] else (value,)
        return all(
            settings["type"](str(one)) == one and one in (settings["choices"] or (one,))
            for one in each
        )
    except (argparse.ArgumentTypeError, ValueError):
        return False


def flag(text: str) -> Any:
    """A field that is `--its-name` on the command line, without a value; False by default."""
    return dataclasses.field(default=False, metadata={"flag": {"help": text}})


def remaining_arguments() -> Any:
    """A field that takes all arguments after the name of the command, unparsed."""
    return dataclasses.field(default=(), metadata={"remaining": True})


def argument(text: str) -> Any:
    """A field without a default, which is a positional argument."""
    return dataclasses.field(metadata={"argument": {"help": text}})


def methods_option(*default: str) -> Any:
    """The option for the methods that are compared."""
    text = "methods to compare, each METHOD or METHOD:BITS, or all"
    return option(default, text, many=True)


def optimizers_option(*default: str) -> Any:
    """The option for the optimizers that every method is combined with."""
    return option(default, "one or more optimizers", choices=("sgd", "adam"), many=True)


def seeds_option(default: int = 5) -> Any:
    """The option for the number of seeds."""
    return option(default, "number of seeds", positive_integer)


def record_option(default: str) -> Any:
    """The option for the name of the record, or `none`."""
    return option(default, "the record folder is <date>_NAME; none writes no record", folder_name)


def records_option() -> Any:
    """The option for the folder of the records."""
    return option(RECORDS, "folder in which the record folder is created")


def resume_option() -> Any:
    """The option for the record that a study continues."""
    return option(None, "the folder of an interrupted record, which is continued")


def devices_option() -> Any:
    """The option for the number of workers."""
    return option(
        None,
        "number of workers, which are fake devices on the CPU backend (default: the number in "
        "XLA_FLAGS, or 8)",
        device_number,
    )
