"""The benchmark runs on a CPU, keeps what it measured, and says what is wrong in a line."""

import json
import pathlib
from typing import Any

import pytest

from pallas_kernels.arg_specs import ROWS
from pallas_kernels.bench import main
from pallas_kernels.benchmark import torch_equivalents
from pallas_kernels.benchmark.goals import Measurement, verdicts
from pallas_kernels.benchmark.timing import Candidate, Times, time_in_turn


@pytest.mark.slow
def test_a_run_is_a_record(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "made" / "record"
    arguments = ["--ops", "pack", "--sizes", "8", "--samples", "3", "--output", str(folder)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "pack, 4 bits" in printed and "GB/s" in printed
    assert "pack, 4 bits, at least 0.8 of a copy: not measured" in printed
    assert "quantize" not in printed
    config = json.loads((folder / "config.json").read_text())
    assert config["finished"] and config["sizes"] == [256]
    environment = (folder / "environment.txt").read_text()
    assert "command: python -m pallas_kernels.bench --ops pack" in environment
    assert "jaxlib: " in environment and "devices: " in environment
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    labels = [row.label for row in ROWS if row.op.startswith("pack")]
    assert [(row["label"], row["size"], row["implementation"]) for row in lines] == [
        (label, 256, implementation) for label in labels for implementation in ("copy", "reference")
    ]
    assert all(len(row["seconds"]) == 3 and min(row["seconds"]) > 0 for row in lines)
    assert {row["bytes"] for row in lines if row["implementation"] == "copy"} == {2048}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sizes", "32"], "--sizes: must be in 0 to 31, got 32"),
        (["--sizes", "many"], "--sizes: invalid int value: 'many'"),
        (["--ops", "sort"], "--ops: invalid choice: 'sort'"),
        (["--samples", "0"], "--samples: must be at least 1, got 0"),
        (["--output", "."], "--output: . already exists"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    said = capsys.readouterr().err
    assert exit_.value.code == 2
    assert words in said and said.count("\n") == 1


def test_a_folder_that_cannot_be_made_is_one_line(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["--output", str(tmp_path / "file" / "record")]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("cannot create ")
        and "record: Not a directory" in said
        and said.count("\n") == 1
    )


def test_calls_are_queued_until_a_sample_is_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    now, log = 0.0, []

    def call() -> str:
        nonlocal now
        now += 0.001
        log.append("call")
        return "result"

    def wait(result: str) -> None:
        assert result == "result"
        log.append("wait")

    monkeypatch.setattr("time.perf_counter", lambda: now)
    times = time_in_turn({"op": Candidate(call, wait)}, 2, queue=True)["op"]
    assert times.calls * 0.001 >= 0.02 and times.calls <= 50
    assert times.seconds == pytest.approx([0.001, 0.001])
    assert log[-(times.calls + 1) :] == ["call"] * times.calls + ["wait"]
    log.clear()
    assert time_in_turn({"op": Candidate(call, wait)}, 3, queue=False)["op"].calls == 1
    assert log == ["call", "wait"] * 4


def test_spread_is_that_of_the_middle_half() -> None:
    times = Times(1, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert times.median == 3.0 and times.spread == pytest.approx(2 / 3)
    assert Times(1, [1.0]).spread == 0


def _measured(label: str, exponent: int, implementation: str, seconds: float, share: float) -> Any:
    (row,) = (row for row in ROWS if row.label == label)
    return Measurement(row, 2**exponent, implementation, seconds, share)


def test_goals_count_the_fastest_implementation_and_the_worst_size() -> None:
    label = "quantize float32, 8 bits"
    rows = [row for row in ROWS if row.label == label]
    measured = [
        _measured(label, 24, "reference", 1.0, 0.1),  # Too small to count.
        _measured(label, 26, "copy", 0.1, 1.0),
        _measured(label, 26, "reference", 2.0, 0.5),
        _measured(label, 26, "mosaic_gpu", 1.0, 0.9),
        _measured(label, 28, "reference", 4.0, 0.86),
    ]
    goal = f"{label}, at least 0.85 of a copy"
    assert verdicts(rows, measured, True) == [f"{goal}: reached, 0.86 at 268,435,456 coordinates"]
    measured.append(_measured(label, 27, "mosaic_gpu", 3.0, 0.6))
    (line,) = verdicts(rows, measured, True)
    assert line == f"{goal}: not reached, 0.60 at 134,217,728 coordinates"
    assert verdicts(rows, measured, False) == [f"{goal}: not measured"]


def test_goals_beside_torch() -> None:
    label = "sketch tiles, decode mean"
    rows = [row for row in ROWS if row.label == label]
    own = _measured(label, 26, "mosaic_gpu", 1.0, 0.7)
    goal = f"{label}, at least 5 times PyTorch"
    assert verdicts(rows, [own], True)[1] == f"{goal}: not measured"
    torch = _measured(label, 26, "torch", 4.0, 0.2)
    assert verdicts(rows, [own, torch], True)[1].startswith(f"{goal}: not reached, 4.00 at ")


def test_equivalents_are_of_rows_and_of_every_goal_beside_torch() -> None:
    labels = {row.label for row in ROWS}
    assert set(torch_equivalents.EQUIVALENTS) <= labels
    wanted = {row.label for row in ROWS if row.times_torch}
    assert wanted and wanted <= set(torch_equivalents.EQUIVALENTS)
