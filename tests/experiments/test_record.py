"""Records on a full disk, and of concurrent runs."""

import io
import json
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from experiments.cli.configs import Train
from experiments.cli.errors import ExperimentError, Interrupted
from experiments.study import record as recording
from experiments.study.record import METRICS, Record, write_atomically

ROW = {"kind": "step", "loss": 0.5, "text": "x" * 50}


@pytest.fixture(autouse=True)
def quick_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Avoids calls of git."""
    monkeypatch.setattr(recording, "describe_environment", lambda: "environment\n")


def make(folder: Path, name: str = "run", file: type[io.FileIO] = io.FileIO) -> Record:
    record = Record(Train(record=name, records=str(folder)))
    record._metrics.close()
    record._metrics = file(record.folder / METRICS, "ab")
    return record


@contextmanager
def no_file_longer(size: int) -> Iterator[None]:
    """Writes above the limit are truncated and then fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_row_is_not_written_to_a_full_disk(tmp_path: Path) -> None:
    length = len(json.dumps(ROW)) + 1
    with make(tmp_path) as record:
        with no_file_longer(2 * length + length // 2):
            record.add(ROW)
            record.add(ROW)
            with pytest.raises(ExperimentError, match=r"metrics.jsonl cannot be written: File too"):
                record.add(ROW)
        metrics = record.folder / METRICS
        assert [json.loads(line) for line in metrics.read_text().splitlines()] == [ROW, ROW]
        record.add(ROW)  # The disk is no longer full.
    assert [json.loads(line) for line in metrics.read_text().splitlines()] == [ROW] * 3


class Halves(io.FileIO):
    """Writes half of each argument."""

    def write(self, content: bytes) -> int:
        return super().write(content[: -(-len(content) // 2)])


class Stops(Halves):
    """Raises an interrupt at the second part."""

    def write(self, content: bytes) -> int:
        if len(content) < len(json.dumps(ROW)):
            raise KeyboardInterrupt
        return super().write(content)


def test_a_row_written_in_parts_is_complete_or_removed(tmp_path: Path) -> None:
    with make(tmp_path, file=Halves) as record:
        record.add(ROW)
    assert json.loads((record.folder / METRICS).read_text()) == ROW
    with pytest.raises(Interrupted), make(tmp_path, file=Stops) as record:
        record.add(ROW)
    assert (record.folder / METRICS).read_bytes() == b""


def test_a_full_disk_leaves_the_previous_file(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    write_atomically(path, b"before")
    with (
        no_file_longer(10),
        pytest.raises(ExperimentError, match=r"table\.csv cannot be written: File too large\."),
    ):
        write_atomically(path, bytes(100))
    assert [file.name for file in tmp_path.iterdir()] == ["table.csv"]
    assert path.read_bytes() == b"before"


def test_concurrent_runs_of_one_name_have_distinct_folders(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        records = [*threads.map(lambda _: make(tmp_path / "records"), range(8))]
    for record in records:
        with record:
            pass
    names = sorted(record.folder.name[len("2026-01-01_") :] for record in records)
    assert names == ["run", *(f"run_{number}" for number in range(2, 9))]
    assert all((record.folder / "config.json").is_file() for record in records)
