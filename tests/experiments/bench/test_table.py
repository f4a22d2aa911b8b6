"""The table of the bench: its rows, regressions and records."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.bench import compare, methods, timing
from experiments.bench import record as bench_record
from experiments.bench import run as bench
from experiments.bench import table as bench_table
from experiments.bench.record import BenchRecord, Row
from experiments.cli.configs import Bench as Config
from experiments.cli.errors import ExperimentError
from jaxcomm.catalogue import FAMILIES, METHODS
from tests.records import committed

RECORDS = Path(__file__).parents[3] / "experiments" / "records"
HEADER: Row = {
    "kind": "bench", "began": "2026-11-23T00:00:00+00:00", "command": "make bench",
    "commit": "a" * 40, "changed": False, "machine": "here", "jax": "0.12", "coordinates": 100,
    "parameters": 200, "schema": 1,
}  # fmt: skip
ROW: Row = {
    "kind": "bench_row", "family": "sparse", "name": "top_k", "nanoseconds": [9.0, 9.3],
    "baseline": [0.9, 0.9], "compile_seconds": 2.0, "lines": 1000, "collectives": 2,
    "accessed": 5000, "temporaries": 400, "commit": "a" * 40,
}  # fmt: skip
FAMILY: Row = {"kind": "bench_memory", "family": "f", "name": "top_k", "arguments": 1, "peak": 2,
               "resident": 3.0}  # fmt: skip


def test_the_bench_has_a_row_of_every_method() -> None:
    assert {*METHODS} - {*methods.ROWS} == {method.name for method in FAMILIES["around"]}
    assert {*methods.GOAL} <= {*methods.ROWS}


def test_rows_are_selected_by_name_and_by_family() -> None:
    assert {*methods.select_families(["all"])} == {*methods.ROWS}
    assert methods.select_families(["sparse", "dpsgd"])["dpsgd"] == "gossip"
    assert {"top_k_sgd", "dpsgd"} < {*methods.select_families(["sparse", "dpsgd"])}
    assert {*methods.select_families(methods.QUICK)} == {*methods.QUICK}
    assert (
        {*methods.select_families(["goals"])}
        == {name for name, row in methods.TIMED.items() if row.goal}
        > {"global_qsgd_8_bits", "gtop_k"}
    )
    with pytest.raises(
        ExperimentError, match=r"--only must be of goals, quantized, .* or all, got 'best'"
    ):
        methods.select_families(["mean", "best"])


def worse(**changes: Any) -> list[str]:
    return compare.regressions({"top_k": ROW}, [{**ROW, **changes}])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nanoseconds": [10.5, 10.6]}, "11.67 times the baseline, 10.00 before"),
        # One disturbed repeat does not hide a regression.
        ({"nanoseconds": [10.5, 30.0, 10.6]}, "11.67 times the baseline, 10.00 before"),
        ({"compile_seconds": 3.1}, "3.1 s of cores to compile, 2.0 before"),
        ({"lines": 1001}, "1,001 HLO lines, 1,000 before"),
        ({"collectives": 3}, "3 collectives, 2 before"),
        ({"accessed": 5001}, "5,001 bytes accessed, 5,000 before"),
        ({"temporaries": 401}, "401 bytes of temporaries, 400 before"),
    ],
)
def test_a_regression_is_named(changes: dict[str, Any], said: str) -> None:
    (line,) = worse(**changes)
    assert line.startswith(f"top_k: {said}") and line.endswith("(aaaaaaa)")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"nanoseconds": [9.8, 9.8]},  # 9 %.
        {"nanoseconds": [12.0, 16.0]},  # Repeats differ by a third, as do the two runs.
        {"nanoseconds": [10.5, 10.5], "baseline": [0.9, 1.1]},
        {"nanoseconds": [27.0, 27.3], "baseline": [2.7, 2.7]},  # A slow hour.
        {"nanoseconds": [], "baseline": []},
        {"compile_seconds": 2.9},
        {"lines": 900, "collectives": 1, "accessed": 1, "temporaries": 1},
    ],
)
def test_noise_and_improvements_are_not_regressions(changes: dict[str, Any]) -> None:
    assert worse(**changes) == []


def test_a_verdict_names_the_commits() -> None:
    slow = {**ROW, "lines": 2000}
    assert compare.verdict({"top_k": ROW}, [ROW]) == [
        "1 rows compared with aaaaaaa: no regression above noise."
    ]
    assert "1 REGRESSIONS" in compare.verdict({"top_k": ROW}, [slow])[0]
    assert "nothing is compared" in compare.verdict({}, [ROW])[0]


def write(folder: Path, record: BenchRecord, finished: bool = True) -> Path:
    folder.mkdir()
    header, rows, families = record
    lines = map(json.dumps, [header, *rows, *families])
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    (folder / "config.json").write_text(json.dumps({"finished": finished}))
    return folder


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = BenchRecord(HEADER, [ROW, {**ROW, "name": "gtop_k"}], [FAMILY])
    assert bench_record.read(write(tmp_path / "a", record)) == record


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
    (tmp_path / "broken" / "metrics.jsonl").write_text("x")
    found = bench_record.newest_rows(tmp_path, HEADER)
    assert {name: row["lines"] for name, row in found.items()} == {"mean": 1000, "top_k": 7}


def test_untimed_rows_have_no_time_in_the_table() -> None:
    table = bench_table.to_table(
        [ROW, {**ROW, "name": "mean", "nanoseconds": [], "baseline": []}], 200
    )
    cells = [[*column.cells] for column in table.columns]
    assert cells[2] == ["9.00", "-"] and cells[3] == ["10.0", "-"]
    assert cells[5] == ["25.0", "25.0"] and cells[6] == ["2.0", "2.0"]


@pytest.mark.slow
def test_groups_are_timed_with_the_baseline_in_a_subprocess() -> None:
    (group,) = timing.time_in_subprocess(["mean", "qsgd"], 8, 2)
    assert [*group] == ["baseline", "mean", "qsgd"]
    assert all(len(each) == 2 and min(each) > 0 for each in group.values())
    with pytest.raises(ExperimentError, match="ended with 1"):
        list(timing.time_in_subprocess(["no such row"], 8, 2))


@pytest.mark.slow
def test_the_bench_records_what_it_prints_and_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(only=("mean", "dpsgd"), side=8, width=4, repeats=1, records=str(tmp_path))
    assert bench.main(config) == 0 and "nothing is compared" in capsys.readouterr().out
    (folder,) = tmp_path.iterdir()
    record = bench_record.read(folder)
    assert [row["name"] for row in record.rows] == ["mean", "dpsgd"] and record.header["jax"]
    assert bench_table.write_readme(record) == (folder / "README.md").read_text()
    (faster,) = (row for row in record.rows if row["name"] == "dpsgd")
    write(tmp_path / "lean", BenchRecord(record.header, [{**faster, "collectives": 0}], []))
    assert bench.main(Config(**{**vars(config), "against": str(tmp_path / "lean")})) == 0
    assert f"{faster['collectives']} collectives, 0 before" in capsys.readouterr().out


COMMITTED = committed("*_bench")


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda folder: folder.name)
def test_the_readme_of_a_record_is_reproduced(folder: Path) -> None:
    record = bench_record.read(folder)
    assert bench_table.write_readme(record) == (folder / "README.md").read_text(encoding="utf-8")
    assert not record.header["changed"] and len(record.rows) > 90
