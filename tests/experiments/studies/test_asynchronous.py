"""The study of asynchronous training: short runs, on processes of Ray."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from experiments.studies import asynchronous
from experiments.studies.asynchronous import Options, interval, main
from experiments.tasks.task import Task
from jaxcomm.synchronization import deterministic

pytestmark = pytest.mark.xdist_group("ray")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no Ray")
def test_goodput_is_a_share_of_the_same_run_without_deaths(tmp_path: Path) -> None:
    config = Options(tmp_path, "goodput", ("server",), seconds=100.0, deaths=20.0, seeds=1)
    assert main(config) == 0
    (row,) = json.loads((tmp_path / "goodput.json").read_text())
    assert min(row["examples"]) > 0 and 0.2 < row["share"] < 2
    assert 0.3 < row["training_ratio"] < 3


@pytest.mark.slow
def test_the_event_engine_predicts_a_faster_loss_for_faster_workers() -> None:
    task = Task("digits")
    policy, params = asynchronous.runs.POLICIES["server"](), task.first_weights(0)
    times = []
    for slow in (0.4, 4.0):
        each = deterministic([slow / 4] * 3 + [slow])
        losses = asynchronous._predicted(task, policy, params, each, 0.01)
        times.append(asynchronous.runs.first_below(losses, 1.5))
    assert None not in times and 5 < times[1] / times[0] < 15


def test_an_interval_holds_the_mean() -> None:
    mean, low, high = interval([1.0, 2.0, 3.0])
    np.testing.assert_allclose([mean, low + high], [2, 4])
    assert low < -0.4
