"""The studies and other commands: `python -m experiments NAME`."""

import importlib
from pathlib import Path

from experiments.study.run import Command, Study

MODULES = {
    **{
        path.stem: f"studies.{path.stem}" for path in sorted(Path(__file__).parent.glob("[!_]*.py"))
    },
    **dict.fromkeys(("digits", "sharded", "catalogue"), "studies.survey"),
    **{"budgets": "studies.pace", "bench": "bench.run", "timeline": "bench.timeline"},
}
"""The module of each command, which has it under its name in capitals."""


def load(name: str) -> Study | Command:
    """The study or the command of a name."""
    return getattr(importlib.import_module(f"experiments.{MODULES[name]}"), name.upper())
