"""The command of a study: runs or continues it, and writes its record."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.cli.errors import ExperimentError, Interrupted
from experiments.cli.progress import Progress
from experiments.report import report
from experiments.study import readme
from experiments.study.claims import Results, judge_all, state
from experiments.study.json_files import read_utf8
from experiments.study.record import NoRecord, Record, describe_environment, open_record
from experiments.study.store import (
    CLAIMS,
    ResumedRecord,
    environment,
    read,
    read_config,
    require_claims,
    resumed_config,
)
from experiments.study.study import Study, run
from experiments.study.tidy import Row
from experiments.training import cluster


def analyze(study: Study, config: Any, rows: Sequence[Row], environment: str) -> Results:
    """The table and the judged claims of rows."""
    derived = study.derive(rows)
    results = Results(config, derived, study.table.lines(derived), environment)
    return dataclasses.replace(results, judgements=judge_all(study.claims, results))


def read_results(study: Study, folder: Path) -> Results:
    """The results of a record. Claims that the study has gained since then are not judged.

    Raises:
      ExperimentError: If the folder is not a record of the study, or a line is not a valid row.
    """
    config = read_config(study.config, folder)
    results = analyze(study, config, read(folder), environment(folder))
    path = folder / CLAIMS
    if not path.exists():
        return dataclasses.replace(results, are_stated=False)
    stated = read_utf8(path).splitlines()
    judged = [each for each in results.judgements if f"- {each.claim.text}" in stated]
    return dataclasses.replace(results, judgements=judged)


def draw(study: Study, results: Results, folder: Path) -> list[Path]:
    """Draws the figures of a record; returns their paths."""
    return [figure.draw(folder, results) for figure in study.figures]


def _open(study: Study, config: Any) -> tuple[Any, Record | NoRecord, Sequence[Row]]:
    """The config, the record and its rows. User errors are raised here, before any run."""
    stated = state(study.name, study.claims)
    if not getattr(config, "resume", None):
        study.settings(config)
        record = open_record(config, study=study.name)
        record.write(CLAIMS, stated)
        return config, record, ()
    folder = Path(config.resume)
    config = resumed_config(config, folder)
    study.settings(config)
    require_claims(folder, stated)
    resumed = ResumedRecord(config, folder) if cluster.is_main_process() else None
    rows = cluster.from_main_process(resumed.rows if resumed else ())
    return config, resumed or NoRecord(), rows


def write(study: Study, results: Results, record: Record | NoRecord) -> None:
    """Writes the table, the README, the figures and the report of a study to its record."""
    record.write("table.csv", study.table.to_csv(results.lines))
    record.write("README.md", readme.write(study, results))
    for name, content in study.files(results).items():
        record.write(name, content)
    if record.folder:
        draw(study, results, record.folder)
        record.write(report.FILE, report.of_study(study, results, record.folder))


def main(study: Study, config: Any) -> int:
    """Runs a study, or continues the record `config.resume`; returns the exit code.

    Raises:
      ExperimentError: If an option is invalid, or the disk is full. Finished runs are kept.
      Interrupted: After Ctrl+C. Finished runs are kept.
    """
    config, record, rows = _open(study, config)
    hint = f"Continue it with --resume {record.folder}." if record.folder else ""
    try:
        settings, seeds = len(study.settings(config)), len(study.seeds(config))
        parts = settings * seeds if study.interleaved else settings
        with record, Progress(parts) as progress, cluster.reraise_lost_process():
            progress.print(f"{study.name}: {settings} settings, {seeds} seeds each")
            rows = run(study, config, record, progress, rows)
            written = environment(record.folder) if record.folder else None
            results = analyze(study, config, rows, written or describe_environment())
            progress.print(study.table.to_rich(results.lines))
            for judgement in results.judgements:
                progress.print(judgement.markdown)
            write(study, results, record)
            if record.folder:
                progress.print(f"Record: {record.folder}")
            record.finish()
    except Interrupted as interrupt:
        raise Interrupted(f"{interrupt} {hint}".strip()) from interrupt
    except ExperimentError as error:
        if not record.folder:
            raise
        raise type(error)(f"{error} {hint}") from error
    return study.exit_code(results)
