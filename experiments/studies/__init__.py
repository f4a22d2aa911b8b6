"""The studies: every module has one, as `STUDY`, and is the command of its name.

A study module imports no JAX: its options decide how JAX starts. Its functions import what trains.
"""

import functools
import importlib
import pkgutil
import pydoc
from pathlib import Path
from typing import Any

from experiments.cli.parse import Command


@functools.cache
def names() -> tuple[str, ...]:
    """The names of all studies, without an import of one."""
    return tuple(each.name for each in pkgutil.iter_modules(__path__) if not each.ispkg)


def load(name: str) -> Any:
    """The study of a name."""
    return importlib.import_module(f"{__name__}.{name}").STUDY


def command_of(name: str) -> Command:
    """The command of a study. Its module is imported when its options are needed."""
    path = Path(__file__).with_name(f"{name}.py")
    return Command(pydoc.synopsis(str(path)) or "", lambda: load(name).config)
