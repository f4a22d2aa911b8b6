"""The study of proximal steps: its smallest run."""

from pathlib import Path

import pytest

from experiments.studies.proximal import STUDY, Proximal
from experiments.study.command import main
from experiments.study.store import read


@pytest.mark.slow
def test_the_smallest_run(tmp_path: Path) -> None:
    config = Proximal(
        strengths=(0.5,), seeds=1, workers=2, steps=24, batch=16, records=str(tmp_path)
    )
    assert main(STUDY, config) == 0
    (folder,) = tmp_path.iterdir()
    dense, sparse = (row for row in read(folder) if row["kind"] == "run")
    assert dense["same"] and sparse["same"]
    assert sparse["weights"] < dense["weights"] and sparse["pulled"] < dense["pulled"]
    assert (folder / "bytes_against_density.png").read_bytes().startswith(b"\x89PNG")
