"""The study of proximal steps: its claims on synthetic rows, its smallest run, and mistakes."""

from pathlib import Path
from typing import Any

import pytest

from experiments.studies.proximal import SPARSE, STUDY, Proximal
from experiments.study.command import analyze, main
from experiments.study.store import read
from experiments.study.tidy import make_row

NUMBERS = {
    "test_loss": 0.1,
    "weights": 0.2,
    "updates": 0.2,
    "room": 0.25,
    "pulled": 100.0,
    "sent": 200.0,
    "sent_ratio": 0.7,
}


def outcomes(error: float, ratio: float, same: bool) -> list[str]:
    rows: list[Any] = []
    for seed in range(3):
        for strength, worse in (("0", 0.0), (SPARSE, error)):
            values = {**NUMBERS, "test_error": 0.02 + worse + 0.001 * seed}
            values |= {"pull_ratio": ratio, "pull_ratio_16": 2 * ratio, "same": same}
            rows.append(make_row("run", {"strength": strength, "seed": seed}, values))
    judgements = analyze(STUDY, Proximal(), rows, "").judgements
    return [judgement.findings[-1].outcome for judgement in judgements]


def test_claims_fail_if_the_method_does() -> None:
    assert outcomes(0.0, 0.4, True) == ["holds"] * 3
    assert outcomes(0.1, 0.6, False) == ["does not hold"] * 3


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
