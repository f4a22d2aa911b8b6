"""The table of the bench: its rows, regressions and records."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.bench import record as bench_record
from experiments.bench import run as bench
from experiments.bench import updates
from experiments.bench.record import BenchRecord, Row
from experiments.errors import ExperimentError
from jaxcomm.catalogue import FAMILIES, METHODS
from tests.records import committed

HEADER: Row = {
    "kind": "bench", "began": "2026-11-23T00:00:00+00:00", "command": "make bench",
    "commit": "a" * 40, "machine": "here", "jax": "0.12", "coordinates": 100,
    "parameters": 200, "schema": 1,
}  # fmt: skip
ROW: Row = {
    "kind": "bench_row", "family": "sparse", "name": "top_k", "nanoseconds": [9.0, 9.3],
    "baseline": [0.9, 0.9], "compile_seconds": 2.0, "lines": 1000, "collectives": 2,
    "accessed": 5000, "temporaries": 400, "commit": "a" * 40,
}  # fmt: skip


def test_the_bench_has_a_row_of_every_method() -> None:
    assert {*METHODS} - {*updates.ROWS} == {method.name for method in FAMILIES["around"]}
    assert {*updates.GOALS} <= {*updates.ROWS} - updates.PER_WORKER


def test_rows_are_selected_by_name_and_by_family() -> None:
    assert bench.select_rows(["all"]) == [*updates.ROWS]
    assert {"top_k_sgd", "dpsgd"} < {*bench.select_rows(["sparse", "dpsgd"])}
    assert {*bench.select_rows(bench.QUICK)} == {*bench.QUICK}
    assert {*bench.select_rows(["goals"])} == {*updates.GOALS}
    with pytest.raises(ExperimentError, match=r"--only must be of goals, quantized, .*'best'"):
        bench.select_rows(["mean", "best"])


REGRESSIONS: list[tuple[dict[str, Any], str]] = [
    ({"nanoseconds": [10.5, 10.6]}, "11.67 times the baseline, 10.00 before"),
    # One disturbed repeat does not hide a regression.
    ({"nanoseconds": [10.5, 30.0, 10.6]}, "11.67 times the baseline, 10.00 before"),
    ({"compile_seconds": 3.1}, "3.1 s of cores to compile, 2.0 before"),
    ({"lines": 1001}, "1,001 HLO lines, 1,000 before"),
]
NOISE: list[dict[str, Any]] = [
    {"nanoseconds": [9.8, 9.8]},  # 9 %.
    {"nanoseconds": [12.0, 16.0]},  # Repeats differ by a third, as do the two runs.
    {"nanoseconds": [10.5, 10.5], "baseline": [0.9, 1.1]},
    {"nanoseconds": [27.0, 27.3], "baseline": [2.7, 2.7]},  # A slow hour.
    {"nanoseconds": [], "baseline": []},
    {"compile_seconds": 2.9},
    {"lines": 900, "collectives": 1, "accessed": 1, "temporaries": 1},
]


def test_regressions_are_named_and_noise_is_not() -> None:
    for changes, said in REGRESSIONS:
        result, line = bench_record.verdict({"top_k": ROW}, [{**ROW, **changes}])
        assert "1 REGRESSIONS" in result and line.startswith(f"top_k: {said}"), changes
    for changes in NOISE:
        said = "1 rows compared with aaaaaaa: no regression above noise."
        assert bench_record.verdict({"top_k": ROW}, [{**ROW, **changes}]) == [said]
    assert "nothing is compared" in bench_record.verdict({}, [ROW])[0]


def write(folder: Path, record: BenchRecord, finished: bool = True) -> Path:
    folder.mkdir()
    header, rows, families = record
    lines = map(json.dumps, [header, *rows, *families])
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "config.json").write_text(json.dumps({"finished": finished}))
    return folder


def test_each_row_is_compared_with_the_newest_comparable_row(tmp_path: Path) -> None:
    def add(name: str, day: int, rows: list[Row], finished: bool = True, **changes: Any) -> None:
        header = {**HEADER, "began": f"2026-11-{day}T00:00:00+00:00", **changes}
        write(tmp_path / name, BenchRecord(header, rows, []), finished)

    add("old", 10, [ROW, {**ROW, "name": "mean"}])
    add("a_new", 11, [{**ROW, "lines": 7}])
    add("other_machine", 12, [{**ROW, "lines": 8}], machine="there")
    add("interrupted", 13, [{**ROW, "lines": 9}], False)
    add("of_old_schema", 14, [{**ROW, "lines": 9}], schema=0)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "metrics.jsonl").write_text("x\n")
    found = bench_record.newest_rows([tmp_path], HEADER)
    assert {name: row["lines"] for name, row in found.items()} == {"mean": 1000, "top_k": 7}


def test_untimed_rows_have_no_time_in_the_table() -> None:
    untimed = {**ROW, "nanoseconds": [], "baseline": []}
    timed, other = bench_record.method_cells([ROW, untimed], 200)
    assert timed[2:4] == ("9.00", "10.0") and other[2:4] == ("-", "-")
    assert timed[5:7] == ("25.0", "2.0")


@pytest.mark.slow
def test_groups_are_timed_with_the_baseline_in_a_subprocess() -> None:
    times = updates.time_in_subprocess(["mean", "qsgd"], 8, 2)
    assert {"mean", "qsgd"} <= {*times}
    assert all(len(each) == 2 and min(each) > 0 for pair in times.values() for each in pair)
    with pytest.raises(ExperimentError, match="ended with 1"):
        updates.time_in_subprocess(["no such row"], 8, 2)


@pytest.mark.slow
def test_the_bench_records_what_it_prints_and_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = bench.Bench(only=("mean", "dpsgd"), side=8, width=4, repeats=1, records=str(tmp_path))
    assert bench.main(config) == 0 and "nothing is compared" in capsys.readouterr().out
    (folder,) = tmp_path.iterdir()
    record = bench_record.read(folder)
    assert [row["name"] for row in record.rows] == ["mean", "dpsgd"] and record.header["jax"]
    assert bench_record.write_readme(record) == (folder / "README.md").read_text()
    (faster,) = (row for row in record.rows if row["name"] == "dpsgd")
    write(tmp_path / "lean", BenchRecord(record.header, [{**faster, "collectives": 0}], []))
    assert bench.main(bench.Bench(**{**vars(config), "against": str(tmp_path / "lean")})) == 0
    assert f"{faster['collectives']} collectives, 0 before" in capsys.readouterr().out


def test_the_readme_of_a_record_is_reproduced() -> None:
    for folder in committed("*_bench"):
        record, text = bench_record.read(folder), (folder / "README.md").read_text(encoding="utf-8")
        assert bench_record.write_readme(record) == text and len(record.rows) > 90
