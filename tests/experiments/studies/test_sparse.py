"""The comparison of sparse methods: small runs, and wrong options."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.cli.errors import ExperimentError
from experiments.methods.sparse import SPARSE_METHODS
from experiments.studies.sparse import S2, STUDY, Sparse
from experiments.study import command
from experiments.study.claims import Results
from experiments.study.columns import Line
from experiments.study.readme import write
from experiments.study.store import read
from experiments.study.tidy import of_kind
from experiments.training.densities import LeafDensity
from tests.slow import slow


def by_method(results: Results) -> dict[str, Line]:
    return {line.where: line for line in results.lines}


@pytest.fixture
def text(tmp_path: Path) -> str:
    words = np.random.default_rng(0).integers(0, 200, 3000)
    path = tmp_path / "text"
    path.write_text(" ".join(f"w{word}" for word in words), encoding="utf-8")
    return str(path)


SMALL = {"vocabulary": 150, "seeds": 2, "steps": 2, "batch": 8, "learning_rates": (0.1,),
         "trials": 1, "calibration_batches": 2, "repetitions": 1, "devices": 2}  # fmt: skip


def tiny(tmp_path: Path, text: str, methods: tuple[str, ...], **options: Any) -> Path:
    kept = {"record": "tiny", "records": str(tmp_path)}
    settings: dict[str, Any] = {"data": text, "methods": methods, **SMALL, **kept, **options}
    assert command.main(STUDY, Sparse(**settings)) == 0
    (folder,) = tmp_path.glob("*_tiny")
    return folder


def check_record(folder: Path) -> dict[str, Line]:
    """The lines of a finished record, whose README, table and figure are those of its rows."""
    results = command.read_results(STUDY, folder)
    assert write(STUDY, results) == (folder / "README.md").read_text(encoding="utf-8")
    assert STUDY.table.to_csv(results.lines) == (folder / "table.csv").read_text(encoding="utf-8")
    (figure,) = STUDY.figures
    assert (folder / figure.file).read_bytes().startswith(b"\x89PNG")
    return by_method(results)


def sparse_leaves(folder: Path) -> list[str]:
    rows = [row for row in of_kind(read(folder), "fact") if row["about"] == "density"]
    return [leaf.leaf for leaf in map(LeafDensity.of, rows) if leaf.is_sparse]


@pytest.mark.slow
def test_every_method_trains_and_exact_methods_agree(tmp_path: Path, text: str) -> None:
    lines = check_record(tiny(tmp_path, text, ("all",)))
    assert {*lines} == {*SPARSE_METHODS} and {*S2["method"]} <= {*lines}
    assert 0 < lines["union"]["overflow"] + lines["union"]["union_density"] < 1
    assert lines["s2_mean_1"]["expected_error"] > 0 and lines["s2_peel"]["unpeeled"] < 0.1
    gathered = lines["all_gather"]
    assert gathered["overflow"] == 0 and gathered["encode_milliseconds"] > 0
    assert gathered["error"] < 1e-9
    exact = lines["mean"]["test_loss"].mean
    for name in ("all_gather", "union", "s2_peel"):
        assert lines[name]["test_loss"].mean == pytest.approx(exact, rel=1e-4)


@pytest.mark.slow
def test_ratings_have_four_sparse_leaves(tmp_path: Path) -> None:
    draw, path = np.random.default_rng(0).integers, tmp_path / "u.data"
    path.write_text("".join(f"{draw(80)}\t{draw(90)}\t{draw(1, 6)}\t1\n" for _ in range(600)))
    options = {"dataset": "movielens", "vocabulary": None, "steps": 20}
    folder = tiny(tmp_path, str(path), ("mean", "s2_mean_1"), **options)
    check_record(folder)
    names = ("item", "item_bias", "user", "user_bias")
    assert sparse_leaves(folder) == [f"{name}/embedding" for name in names]
    assert "squared error" in (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ("all", "foo")}, "--methods must be of mean, .* or all, got 'foo'"),
        ({"dataset": "movielens"}, "--vocabulary is only for --dataset words"),
        slow({"batch": 9}, "--batch 9 is not divisible by 2 workers"),
        slow({"batch": 1000}, "no leaf is sparse"),
    ],
)
def test_user_errors_leave_no_record(
    tmp_path: Path, text: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ExperimentError, match=message):
        tiny(tmp_path, text, **({"methods": ("mean",)} | options))
    assert not [*tmp_path.glob("*_tiny")]
