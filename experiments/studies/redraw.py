"""Writes the table, the README and the figures of a record again, from its rows alone."""

import dataclasses
from pathlib import Path

import tyro

from experiments.errors import ExperimentError
from experiments.studies import MODULES, load
from experiments.study.record import read_settings
from experiments.study.run import Command, Study, read_results, write


@dataclasses.dataclass(frozen=True)
class Redraw:
    """What does a record look like? Writes its table, README and figures from its rows alone."""

    folder: tyro.conf.Positional[str]
    """the folder of the record"""


def study_of(folder: Path) -> Study:
    """The study of a record.

    Raises:
      ExperimentError: If there is none.
    """
    name = read_settings(folder).get("study")
    study = load(name) if name in MODULES else None
    if not isinstance(study, Study):
        raise ExperimentError(f"{folder} is not the record of a study.")
    return study


def main(config: Redraw) -> int:
    """Runs `python -m experiments redraw`."""
    folder = Path(config.folder)
    study = study_of(folder)
    write(study, read_results(study, folder), folder)
    return 0


REDRAW = Command(Redraw, main)
