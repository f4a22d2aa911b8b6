"""The benchmark runs on a CPU, keeps what it measured, and says what is wrong in a line."""

import json
import pathlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest

from pallas_kernels import _dispatch
from pallas_kernels.arg_specs import ROWS, Row
from pallas_kernels.bench import main
from pallas_kernels.benchmark import ops, torch_equivalents
from pallas_kernels.benchmark.candidates import Session, difference
from pallas_kernels.benchmark.goals import Measurement, verdicts
from pallas_kernels.benchmark.record import Record
from pallas_kernels.benchmark.timing import Candidate, Times, busy_seconds, time_in_turn


def results(folder: pathlib.Path) -> list[Any]:
    return Record(folder).results(["right", "times"])


@pytest.mark.slow
def test_a_run_is_a_record(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "made" / "record"
    arguments = ["--ops", "pack", "--sizes", "8", "--samples", "3", "--output", str(folder)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert " 0 failures" in printed and "quantize" not in printed
    assert "pack, 4 bits, at least 0.8 of a copy: not measured" in printed
    config = json.loads((folder / "config.json").read_text())
    assert config["finished"] and config["sizes"] == [256] and config["device"] == "cpu"
    lines = results(folder)
    checked = [row for row in lines if row["kind"] == "check"]
    assert len(checked) == 2 * 8 and not any(row["wrong"] for row in checked)
    timed = [row for row in lines if row["kind"] == "time"]
    labels = [row.label for row in ops.IN_ORDER if row.op.startswith("pack")]
    assert [(row["label"], row["size"], row["implementation"]) for row in timed] == [
        (label, 256, implementation) for label in labels for implementation in ("copy", "reference")
    ]
    assert all(len(row["seconds"]) == 3 and min(row["seconds"]) > 0 for row in timed)
    assert {row["bytes"] for row in timed if row["implementation"] == "copy"} == {2048}
    assert {row["device_seconds"] for row in timed} == {None}  # The profiler sees no device.
    # The same again measures nothing.
    size = len(Record(folder).lines())
    assert main(arguments) == 0 and len(Record(folder).lines()) == size + 1


def test_common_rows_come_first_and_one_size_is_padded() -> None:
    assert ops.CHECK_SIZES["other"][0] % 2**20 == ops.PADDED and ops.PADDED % 2
    assert sorted(map(id, ops.IN_ORDER)) == sorted(map(id, ROWS))
    session = Session(_dispatch.Device("cuda", "NVIDIA H200"), 7)
    keys = [task.key for task in ops.times(session, {}, Record(pathlib.Path("absent")))]
    assert len({*keys}) == len(keys) and keys[0] == "quantize float32, 8 bits, 268435456"


def _row(label: str) -> Row:
    return next(row for row in ROWS if row.label == label)


def test_wrong_bits_are_detected() -> None:
    row, floats = _row("pack, 8 bits"), _row("dequantize, 8 bits, accumulate")
    a, b = jnp.arange(5, dtype=jnp.uint32), jnp.arange(5.0)
    assert difference(row, a, a) == difference(floats, b, b * (1 + 1e-7)) == ""
    assert difference(row, -0.0 * b, jnp.full(5, 0.0).at[2].set(-0.0)) == ""
    nan = b.at[1].set(jnp.nan)
    assert difference(row, nan, nan) == "" and "1 places" in difference(row, nan, b)
    assert difference(row, a, a.at[3].set(9)) == "result 0 differs at 1 places, first at 3"
    assert "is uint32[5], not uint32[4]" in difference(row, a, a[:4])
    assert difference(floats, b, b + 1e-3).startswith("result 0 differs at 5 places")


class Named(NamedTuple):
    """A plane, a line or an event of a profile."""

    name: str = ""
    lines: Any = ()
    events: Any = ()
    start_ns: float = 0
    duration_ns: float = 0


def test_the_profiler_counts_what_overlaps_once() -> None:
    def event(start: float, duration: float) -> Named:
        return Named(start_ns=start, duration_ns=duration)

    streams = [
        Named("Stream #1", events=[event(0, 10), event(20, 10)]),
        Named("Stream #2", events=[event(5, 10), event(22, 2)]),
        Named("Framework Ops", events=[event(0, 1000)]),
    ]
    planes = [Named("/host:CPU", lines=streams), Named("/device:GPU:0", lines=streams)]
    assert busy_seconds(planes) == pytest.approx(25e-9)
    assert busy_seconds(planes[:1]) is None


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
    assert Times(1, [1.0, 2.0, 3.0, 4.0, 5.0]).spread == pytest.approx(2 / 3)  # Its middle half.
    assert times.calls * 0.001 >= 0.02 and times.calls <= 50
    assert times.seconds == pytest.approx([0.001, 0.001])
    assert log[-(times.calls + 1) :] == ["call"] * times.calls + ["wait"]
    log.clear()
    assert time_in_turn({"op": Candidate(call, wait)}, 3, queue=False)["op"].calls == 1
    assert log == ["call", "wait"] * 4


def _measured(label: str, exponent: int, implementation: str, seconds: float, share: float) -> Any:
    return Measurement(_row(label), 2**exponent, implementation, seconds, share)


def test_goals_count_the_fastest_implementation_and_the_worst_size() -> None:
    label = "quantize float32, 8 bits"
    rows = [_row(label)]
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
    label = "sketch tiles, decode mean"
    own, torch = _measured(label, 26, "mosaic_gpu", 1, 0.7), _measured(label, 26, "torch", 4, 0.2)
    goal = f"{label}, at least 5 times PyTorch"
    assert verdicts([own.row], [own], True)[1] == f"{goal}: not measured"
    assert verdicts([own.row], [own, torch], True)[1].startswith(f"{goal}: not reached, 4.00 at ")


def test_equivalents_are_of_rows_and_of_every_goal_beside_torch() -> None:
    labels = {row.label for row in ROWS}
    assert set(torch_equivalents.EQUIVALENTS) <= labels
    wanted = {row.label for row in ROWS if row.times_torch}
    assert wanted and wanted <= set(torch_equivalents.EQUIVALENTS)
