"""Which studies `records` runs, continues and skips."""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from experiments.cli.configs import Records
from experiments.cli.errors import INTERRUPTED, Interrupted
from experiments.study import records

STUDY = SimpleNamespace(name="toy", processes=1)


def write(root: Path, name: str, study: str = "toy", finished: bool = True) -> Path:
    (root / name).mkdir()
    (root / name / "config.json").write_text(json.dumps({"study": study, "finished": finished}))
    return root / name


def config(root: Path, after: str = "2026-11-23") -> Records:
    return Records(records=str(root), after=after)


def test_the_newest_record_of_the_study_counts(tmp_path: Path) -> None:
    for name in ("2026-11-22_toy", "2026-11-23_toy_2", "2026-11-23_toy", "2026-11-23_toy_10"):
        write(tmp_path, name)
    write(tmp_path, "2026-11-24_other", study="other")
    found = records.newest(tmp_path, "toy")
    assert found and found.name == "2026-11-23_toy_10"
    assert records.newest(tmp_path, "absent") is None


def test_a_study_is_run_continued_launched_or_done(tmp_path: Path) -> None:
    run = ["toy", "--records", str(tmp_path)]
    assert records.command_of(STUDY, config(tmp_path)) == run
    launched = records.command_of(SimpleNamespace(name="toy", processes=4), config(tmp_path))
    assert launched == ["launch", "--processes", "4", "--", *run]
    interrupted = write(tmp_path, "2026-11-20_toy", finished=False)
    assert records.command_of(STUDY, config(tmp_path)) == [*run, "--resume", str(interrupted)]
    write(tmp_path, "2026-11-22_toy")
    assert records.command_of(STUDY, config(tmp_path)) == run
    assert records.command_of(STUDY, config(tmp_path, "2026-11-22")) is None


def test_an_interrupt_ends_all_and_a_failure_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(records.studies, "names", lambda: ("a", "b"))
    monkeypatch.setattr(
        records.studies, "load", lambda name: SimpleNamespace(name=name, processes=1)
    )
    codes = {"a": 2, "b": 0}
    monkeypatch.setattr(records, "run", lambda arguments, date: codes[arguments[0]])
    assert records.main(config(tmp_path)) == 2
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [*"aabb"]


def test_a_process_that_was_interrupted_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    process = MagicMock()
    process.__enter__.return_value = process
    process.wait.side_effect = [KeyboardInterrupt, INTERRUPTED]
    monkeypatch.setattr(records.subprocess, "Popen", lambda *args, **options: process)
    with pytest.raises(Interrupted, match="the same command continues with --after 2026-11-23"):
        records.run(["toy"], "2026-11-23")
    process.send_signal.assert_called_once()
