"""A record is continued: nothing is measured twice, and what dies or hangs costs itself only."""

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pallas_kernels.benchmark import parts
from pallas_kernels.benchmark.parts import DEVICE_LOST, NOTHING_LEFT, TIME_OVER, Part, Task
from pallas_kernels.benchmark.record import METRICS, Record

ROOT = Path(__file__).parents[2]
DYING = Part("dying", "tests.pallas_kernels.dying_part", 60)
DEVICE = {"platform": "cpu", "kind": "cpu", "devices": "1 x cpu", "runtime": "none"}


@pytest.fixture
def record(tmp_path: Path) -> Record:
    found = Record(tmp_path / "made" / "record")
    found.begin({"rehearse": True}, DEVICE, ["bench"])
    return found


def noting(ran: list[str], *names: str) -> list[Task]:
    """Tasks that append their names."""
    return [Task({"name": name}, lambda name=name: ran.append(name) or []) for name in names]


def kinds(record: Record) -> list[tuple[str, str]]:
    """The lines, without the first one, of the session."""
    return [(line["kind"], line.get("key", "")) for line in record.lines()[1:]]


@pytest.mark.slow
def test_crashes_and_hangs_affect_only_their_part(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    options: dict[str, Any] = {"rehearse": True, "samples": 3}
    assert parts.run([DYING], record, 300, options)
    ended, _ = record.ends("dying")
    assert {key: line["kind"] for key, line in ended.items()} == {
        "first": "done",
        "raises": "failed",
        "is no number": "failed",
        "dies": "skipped",
        "hangs": "skipped",
        "last": "done",
    }
    assert ended["raises"]["reason"] == "RuntimeError: no such instruction"
    assert ended["dies"]["reason"] == "2 times the process ended before it"
    assert ended["last"]["results"] == [{"kind": "number", "value": 3}]
    begun = [key for kind, key in kinds(record) if kind == "begun"]
    assert begun == ["first", "raises", "is no number", "dies", "hangs", "last", "dies", "hangs"]
    assert [line["code"] for line in record.lines() if line["kind"] == "died"] == [9, 1, 9, 1]
    assert [one["key"] for one in parts.bad_lines(record, [DYING])] == [
        "raises",
        "is no number",
        "dies",
        "hangs",
    ]


def test_a_second_run_continues_the_first(record: Record, tmp_path: Path) -> None:
    ran: list[str] = []
    tasks = functools.partial(noting, ran)
    assert parts.measure(record, "p", tasks("a", "b"), 60) == NOTHING_LEFT
    before = (record.folder / METRICS).read_bytes()
    assert parts.measure(record, "p", tasks("a", "b"), 60) == NOTHING_LEFT
    assert (record.folder / METRICS).read_bytes() == before and ran == ["a", "b"]
    assert parts.measure(record, "p", tasks("c"), 0) == TIME_OVER
    assert parts.measure(record, "other", tasks("a"), 60) == NOTHING_LEFT
    moved = Record(record.folder.rename(tmp_path / "elsewhere"))  # As from another machine.
    assert parts.measure(moved, "p", tasks("b", "c"), 60) == NOTHING_LEFT
    assert ran == ["a", "b", "a", "c"]


def test_incomplete_lines_are_ignored(record: Record) -> None:
    file = record.folder / METRICS
    record.add({"kind": "done", "part": "p", "key": "a", "results": []})
    for rest in (b'{"kind": "done", "part": "p", "key": "\xff', b"3", b'"text"\n'):
        with file.open("ab") as opened:
            opened.write(rest)
        record.add({"kind": "begun", "part": "p", "key": "b"})
    ended, begun = record.ends("p")
    assert [*ended] == ["a"] and begun == {"b": 3}


def test_interrupted_parts_are_not_failures_and_again_resets_failures(record: Record) -> None:
    def add(kind: str, key: str = "a", **rest: Any) -> None:
        record.add({"kind": kind, "part": "p", "key": key, **rest})

    for kind in ("begun", "cut", "begun", "cut"):
        add(kind)
    ran: list[str] = []
    assert parts.measure(record, "p", noting(ran, "a", "b"), 60) == NOTHING_LEFT
    assert ran == ["b", "a"] and record.ends("p")[1]["a"] == 1
    add("failed", "c", reason="no")
    assert record.results(["p"])[-1]["reason"] == "no"
    record.add({"kind": "again"})
    ended, begun = record.ends("p")
    assert [*ended] == ["b", "a"] and not begun


def test_an_unresponsive_device_ends_the_process(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises() -> list[Any]:
        raise RuntimeError("illegal address")

    tasks = [Task({"name": "a"}, raises), Task({"name": "b"}, lambda: [])]
    monkeypatch.setattr(parts, "_device_answers", lambda: False)
    assert parts.measure(record, "p", tasks, 60) == DEVICE_LOST
    assert kinds(record) == [("begun", "a"), ("failed", "a")]
    monkeypatch.undo()
    assert parts.measure(record, "p", [Task({"name": "c"}, raises), *tasks], 60) == NOTHING_LEFT
    assert kinds(record)[-1] == ("done", "b")


def test_unused_time_of_a_part_goes_to_other_parts(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[str, int]] = []

    def run_part(part: Part, record: Record, seconds: float, options: Any) -> bool:
        given.append((part.name, round(seconds)))
        return part.name == "a" or len(given) > 3

    monkeypatch.setattr(parts, "_run_part", run_part)
    three = [Part("a", "", 60), Part("b", "", 180), Part("c", "", 999)]
    assert parts.run(three, record, 600, {})
    assert given == [("a", 60), ("b", 180), ("c", 600), ("b", 300), ("c", 600)]


def test_a_part_that_cannot_start_is_skipped(record: Record) -> None:
    start = time.monotonic()
    assert not parts.run([Part("absent", "tests.no_such_module", 60)], record, 60, {})
    assert kinds(record) == [("died", ""), ("died", "")] and time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "is no record: name a new folder"),
        (lambda folder: None, "not of {'device': 'NVIDIA H200', 'rehearse': True}: name another"),
    ],
)
def test_another_device_needs_another_record(
    record: Record, spoil: Callable[[Path], None], words: str
) -> None:
    spoil(record.folder)
    with pytest.raises(ValueError, match=words):
        record.begin({"rehearse": True}, DEVICE | {"kind": "NVIDIA H200"}, ["bench"])


def test_a_record_has_a_line_and_an_environment_of_each_run(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    record.finish()
    assert record.config == {"rehearse": True, "device": "cpu", "finished": True}
    monkeypatch.setenv("JAXCOMM_COMMIT", "abc")
    record.begin({"rehearse": True}, DEVICE, ["bench", "--again"])
    assert not record.config["finished"]
    assert [line["kind"] for line in record.lines()] == ["session"] * 2
    assert record.lines()[1]["commit"] == "abc"
    environment = (record.folder / "environment.txt").read_text()
    assert environment.count("jaxlib: ") == 2 and "command: bench --again" in environment
    assert json.loads((record.folder / METRICS).read_text().splitlines()[0])["device"] == "cpu"
