"""Every committed record whose study is in the framework regenerates byte for byte."""

from pathlib import Path

import pytest

from experiments import studies
from experiments.study import readme
from experiments.study.command import read_results
from experiments.study.figures import study_of
from tests.records import committed

RECORDS = [path for path in committed() if (path / "metrics.jsonl").exists()]


@pytest.mark.parametrize(
    "folder",
    [path for path in RECORDS if study_of(path) in studies.names()],
    ids=lambda folder: folder.name,
)
def test_a_record_is_regenerated(folder: Path) -> None:
    study = studies.load(study_of(folder))
    results = read_results(study, folder)
    assert readme.write(study, results) == (folder / "README.md").read_text(encoding="utf-8")
    assert study.table.to_csv(results.lines) == (folder / "table.csv").read_text()
