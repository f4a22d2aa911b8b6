"""The command `figures`: draws the figures of a record again, from its files only."""

import re
from pathlib import Path

from experiments import studies
from experiments.cli.configs import Figures
from experiments.cli.errors import ExperimentError
from experiments.study import command
from experiments.study.store import environment, read_settings

_DRAWN_BY = {"compare": "digits", "train": "digits"}
"""The studies whose figures other commands have."""


def study_of(folder: Path) -> str:
    """The name of the study of a record, of older records from their command.

    Raises:
      ExperimentError: If the record cannot be read.
    """
    name = read_settings(folder).get("study")
    if name is None:
        pattern = r"^command: .* -m experiments (?:launch .* -- )?(compare --preset gossip|\w+)"
        found = re.search(pattern, environment(folder), re.MULTILINE)
        name = found[1] if found else ""
    return _DRAWN_BY.get(name, name)


def _draw(folder: Path) -> list[Path]:
    name = study_of(folder)
    if name not in studies.names():
        raise ExperimentError(f"{folder} is not the record of a study with figures.")
    study = studies.load(name)
    return command.draw(study, command.read_results(study, folder), folder)


def main(config: Figures) -> int:
    """Runs `python -m experiments figures`; returns the exit code."""
    folder = Path(config.folder)
    try:
        print(*_draw(folder), sep="\n")
    except ExperimentError:
        raise
    except KeyError as error:  # Of an earlier study of the name, or of another program.
        raise ExperimentError(
            f"{folder} cannot be drawn: a row lacks the column {error}."
        ) from error
    except Exception as error:  # A row may have a wrong value, or lack one.
        raise ExperimentError(f"{folder} cannot be drawn: {error!r}.") from error
    return 0
