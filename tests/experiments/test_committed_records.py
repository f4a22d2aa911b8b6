"""Every committed record of a study regenerates byte for byte, and its figures are drawn."""

from pathlib import Path

import pytest

from experiments.studies import MODULES
from experiments.studies.redraw import study_of
from experiments.study.record import METRICS, read_settings
from experiments.study.run import read_results, readme
from tests.records import committed

OF_NO_STUDY = {
    *("2026-11-23_bench", "2026-11-25_profile"),
    *("2026-11-28_asynchronous", "2026-11-28_asynchronous_links", "2026-11-29_weight_sync"),
}
OF_STUDIES = [path for path in committed() if path.name not in OF_NO_STUDY]
RECORDS = [path for path in OF_STUDIES if (path / f"{METRICS}.gz").exists()]


def test_all_records_but_five_are_of_a_study() -> None:
    assert RECORDS == OF_STUDIES and len(committed()) == len(RECORDS) + len(OF_NO_STUDY)
    for folder in RECORDS:
        settings = read_settings(folder)
        assert settings["finished"] and settings["study"] in MODULES, folder


@pytest.mark.parametrize("folder", RECORDS, ids=lambda folder: folder.name)
def test_a_record_is_regenerated(folder: Path) -> None:
    study = study_of(folder)
    results = read_results(study, folder)
    assert readme(study, results) == (folder / "README.md").read_text(encoding="utf-8")
    assert study.table.to_csv(results.lines) == (folder / "table.csv").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:Creating legend:UserWarning"
)  # It took a second: a busy machine.
@pytest.mark.parametrize("folder", RECORDS, ids=lambda folder: folder.name)
def test_the_figures_of_a_record_are_drawn(folder: Path, tmp_path: Path) -> None:
    study = study_of(folder)
    results = read_results(study, folder)
    assert study.figures
    for figure in study.figures:
        path = figure.draw(tmp_path, results)
        assert path == tmp_path / figure.file and (folder / figure.file).exists()
        assert path.stat().st_size > 10_000 and path.read_bytes().startswith(b"\x89PNG")
