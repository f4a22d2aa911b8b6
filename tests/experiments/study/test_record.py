"""Records: rows that are written are read, and files that are damaged are named."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from experiments.errors import ExperimentError, Interrupted
from experiments.study import record as recording
from experiments.study.record import CONFIG, METRICS, make_row, new_record, read, read_settings
from tests.experiments.study.test_run import Config

LOSSES = (1e30, 0.1, math.inf, math.nan, 7e35, -7e35)
ROWS = [make_row("run", {"seed": n}, {"loss": loss}) for n, loss in enumerate(LOSSES)]


@pytest.fixture(autouse=True)
def quick_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Avoids calls of git."""
    monkeypatch.setattr(recording, "describe_environment", lambda: "environment\n")


def test_every_row_that_is_written_is_read(tmp_path: Path) -> None:
    with new_record(Config(records=str(tmp_path)), "toy") as record:
        record.add(ROWS)
        assert not read_settings(record.folder)["finished"]
        before = read(record.folder)
        record.finish()
    assert [path.name for path in record.folder.glob("metrics*")] == [f"{METRICS}.gz"]
    after = read(record.folder)
    assert repr(before) == repr(after) == repr(ROWS)
    assert [row["loss"] for row in after[:2]] == [1e30, 0.1]
    assert all(math.isnan(row["loss"]) for row in after[2:])
    assert read_settings(record.folder)["methods"] == ("mean", "half")
    with pytest.raises(ValueError, match="`seed` is the name of more than one column"):
        make_row("run", {"seed": 0}, {"seed": 1})


def test_concurrent_runs_of_one_name_have_distinct_folders(tmp_path: Path) -> None:
    config = Config(records=str(tmp_path / "records"), record="run")
    with ThreadPoolExecutor(8) as threads:
        records = [*threads.map(lambda _: new_record(config, "toy"), range(8))]
    for record in records:
        with pytest.raises(Interrupted, match="is a partial record"), record:
            raise KeyboardInterrupt
    names = sorted(record.folder.name[len("2026-01-01_") :] for record in records)
    assert names == ["run", *(f"run_{number}" for number in range(2, 9))]
    assert new_record(Config(record="none"), "toy").folder is None


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda raw: raw[: len(raw) // 2],
    "a number replaced": lambda raw: raw.replace(b"1", b"one"),
    "in UTF-16": lambda raw: raw.decode("latin-1").encode("utf-16"),
    "a page of an error": lambda raw: b"<!doctype html>\n<title>Not found</title>\n",
    "a list": lambda raw: b"[1]\n",
}


@pytest.mark.parametrize("name", [METRICS, f"{METRICS}.gz", CONFIG])
def test_a_damaged_file_is_data_or_its_folder_is_named(tmp_path: Path, name: str) -> None:
    record, refused = new_record(Config(records=str(tmp_path)), "toy"), set()
    record.add(ROWS)
    if name.endswith("gz"):
        record.finish()
    valid = (record.folder / name).read_bytes()
    for damage, change in DAMAGES.items():
        (record.folder / name).write_bytes(change(valid))
        try:
            read_settings(record.folder) if name == CONFIG else read(record.folder)
        except ExperimentError as error:
            refused.add(damage)
            assert str(record.folder) in str(error) and len(str(error)) < 500
    assert {*[*DAMAGES][2:]} <= refused and ("cut" in refused) == (name != METRICS)
