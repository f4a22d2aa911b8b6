"""Fields of a config that can be set on the command line, and what their values may be."""

import argparse
import dataclasses
import math
from collections.abc import Callable
from typing import Any

RECORDS = "experiments/records"
MAX_DEVICES = 1024
DIGITS = 20  # Longer numbers are read as none: Python refuses to read some.


def _integer(text: str, minimum: int, maximum: int, rule: str) -> int:
    value = int(text) if text.isdecimal() and len(text) <= DIGITS else -1
    if not minimum <= value <= maximum:
        shown = text if len(text) <= 2 * DIGITS else text[:DIGITS] + "..."
        raise argparse.ArgumentTypeError(f"must be an integer {rule}, got {shown!r}")
    return value


def positive_integer(text: str) -> int:
    """1, 2, ... below 2**31, as far as JAX counts."""
    return _integer(text, 1, 2**31 - 1, "of at least 1 and below 2**31")


def device_number(text: str) -> int:
    """1 to 1024, since each fake device takes threads."""
    return _integer(text, 1, MAX_DEVICES, f"from 1 to {MAX_DEVICES}")


def natural_number(text: str) -> int:
    """0, 1, 2, ... below 2**31, which every seed may be."""
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


def folder_name(text: str) -> str:
    """A name that can stand in a path, without a separator."""
    if not text or any(not (letter.isalnum() or letter in "-_.") for letter in text):
        raise argparse.ArgumentTypeError(
            f"must be of letters, digits, '-', '_' and '.' alone, got {text!r}"
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
      default: Its value where the option is not given.
      text: The help.
      parse: From the argument to the value; raises `argparse.ArgumentTypeError`.
      choices: The values allowed, where they can be told without importing JAX.
      many: Whether it takes one or more arguments, for a tuple.
    """
    settings = {"help": text, "type": parse, "choices": choices, "many": many}
    return dataclasses.field(default=default, metadata={"option": settings})


def flag(text: str) -> Any:
    """A field that is `--its-name` on the command line, without a value; False where not given."""
    return dataclasses.field(default=False, metadata={"flag": {"help": text}})


def remaining_arguments() -> Any:
    """A field that takes everything after the name of the command."""
    return dataclasses.field(default=(), metadata={"remaining": True})


def argument(text: str) -> Any:
    """A field without a default, which is a positional argument."""
    return dataclasses.field(metadata={"argument": {"help": text}})


def record_option(default: str) -> Any:
    """The name of the record, or `none`."""
    return option(
        default, "name of the record folder, <date>_NAME, or none to keep nothing", folder_name
    )


def records_option() -> Any:
    """Where records go."""
    return option(RECORDS, "folder that the record folders go into")


def devices_option() -> Any:
    """How many workers."""
    return option(
        None,
        "number of workers, fake devices where the backend is the CPU (default: the number in "
        "XLA_FLAGS, or 8)",
        device_number,
    )
