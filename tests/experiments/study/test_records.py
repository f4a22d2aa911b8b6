"""Which studies `records` runs, continues and skips."""

import json
from pathlib import Path
from types import SimpleNamespace

from experiments.cli.configs import Records
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
