"""The command `report`: writes the report of a record, from its files only."""

from pathlib import Path

from experiments import studies
from experiments.cli.configs import Report
from experiments.cli.errors import ExperimentError
from experiments.report import report
from experiments.study import command
from experiments.study.figures import study_of
from experiments.study.files import write_atomically


def text_of(folder: Path) -> str:
    """The report of a folder.

    Raises:
      ExperimentError: If the folder is not a record, or cannot be read.
    """
    if not folder.is_dir():
        raise ExperimentError(f"{folder} is not a folder.")
    name = study_of(folder) if (folder / "config.json").exists() else ""
    if name not in studies.names():
        return report.of_text(folder)
    study = studies.load(name)
    return report.of_study(study, command.read_results(study, folder), folder)


def main(config: Report) -> int:
    """Runs `python -m experiments report`; returns the exit code."""
    folder = Path(config.folder)
    output = Path(config.output) if config.output else folder / report.FILE
    try:
        text = text_of(folder)
    except ExperimentError:
        raise
    except Exception as error:  # A row may have a wrong value, or lack one.
        raise ExperimentError(f"{folder} has no report: {error!r}.") from error
    write_atomically(output, text.encode())
    print(f"{output}: {len(text.encode()):,} bytes")
    return 0
