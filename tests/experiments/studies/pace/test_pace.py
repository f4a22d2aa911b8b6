"""Windows on the wall clock: the comparison and its record."""

import itertools
import math
import time
from pathlib import Path

import numpy as np
import pytest

from experiments.__main__ import main
from experiments.cli.configs import Pace
from experiments.cli.launch import check
from experiments.studies.pace import run as pace
from experiments.study.record import read_metrics
from experiments.tasks.task import Task
from experiments.training.real_time import Timings, simulate_run, slow_batches, worker_batches
from jaxcomm.synchronization import deadline, deterministic

RECORDS = sorted((Path(pace.__file__).parents[2] / "records").glob("*_pace*"))


def runs(wall: tuple[float, float], clock: tuple[float, float]) -> list[dict]:
    return [
        {"clock": name, "strategy": strategy, "seed": seed, "seconds_to_loss": seconds * (1 + seed)}
        for name, both in (("wall", wall), ("simulated", clock))
        for strategy, seconds in zip((pace.SYNCHRONOUS, pace.NON_BLOCKING), both, strict=True)
        for seed in (0, 1)
    ]


def test_ratios_agree_or_do_not() -> None:
    ratio = pace.speedups_of(runs((4.0, 2.0), (4.4, 2.0)))
    assert ratio.measured == [2, 2] and ratio.relative_difference == pytest.approx(0.1)
    assert "+10 % off: within 20 %" in ratio.sentence
    assert "NOT within" in pace.speedups_of(runs((4.0, 2.0), (5.0, 2.0))).sentence
    never = pace.speedups_of(runs((math.nan, 2.0), (5.0, 2.0)))
    assert never.sentence == "Not every run reached the loss."


def test_workers_iterate_over_their_own_shards() -> None:
    task = Task("digits")
    each = len(task.dataset.train_inputs) // 4
    seen = [
        np.concatenate([x for x, _ in itertools.islice(worker_batches(task, w, 4, each, 0), 2)])
        for w in range(4)
    ]
    for images in seen:
        first, second = np.split(images.reshape(2 * each, -1), 2)
        assert not np.array_equal(first, second)
    assert len(np.unique(np.concatenate(seen).reshape(8 * each, -1), axis=0)) > 3 * each


def test_mini_batches_sleep_and_do_extra_work() -> None:
    worked = []
    began = time.perf_counter()
    taken = [*itertools.islice(slow_batches(iter(range(5)), 0.02, 0.02, worked.append), 2)]
    assert taken == [0, 1] and {*worked} == {0, 1}
    assert time.perf_counter() - began >= 0.08


@pytest.mark.slow
def test_the_simulated_clock() -> None:
    task, config = Task("digits"), Pace(log_every=1)
    speeds = Timings(np.array([0.02, 0.06]), 0.01)
    straggler = deterministic(speeds.minibatch.tolist())
    fast = simulate_run(task, config, straggler, deadline(0.085), speeds, 0, 2)
    np.testing.assert_allclose(fast.seconds, [0.095, 0.19], rtol=1e-5)
    assert fast.minibatches == 10


def test_pace_requires_launch() -> None:
    assert check(["pace", "--repeats", "1"]) == ["pace", "--repeats", "1", "--distributed"]
    assert main(["pace", "--record", "none"]) == 2


@pytest.mark.parametrize("folder", RECORDS, ids=lambda folder: folder.name)
def test_records_agree_with_the_simulator(folder: Path) -> None:
    ratio = pace.speedups_of(read_metrics(folder, "pace_run"))
    assert len(ratio.measured) == len(ratio.simulated) == 5
    assert abs(ratio.relative_difference) <= pace.TOLERANCE
    assert ratio.sentence in (folder / "README.md").read_text(encoding="utf-8")
