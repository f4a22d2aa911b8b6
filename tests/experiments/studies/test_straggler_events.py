"""The methods of the event engine in the study of stragglers: their clocks, data and training."""

import functools
import itertools
import math
from typing import Any

import pytest

from experiments.methods.policies import (
    STRATEGIES,
    Wire,
    all_reduced,
    both_ways,
    through_server,
    with_full_gradients,
)
from experiments.methods.stragglers import SPEEDS, WORKERS, Speeds
from experiments.studies.stragglers import STUDY, Stragglers
from experiments.training.slow_workers import Trainer
from jaxcomm.synchronization import deterministic
from jaxcomm.synchronization.events import sent

WIRE = Wire(bandwidth=1000.0, latency=0.5, all_reduce=7.0, bytes=400, rest_of_shard=30.0)


@pytest.mark.parametrize(
    ("travel", "seconds"),
    [(through_server, 1.5), (both_ways, 0.9), (all_reduced, 7.0), (with_full_gradients, 31.5)],
)
def test_seconds_of_messages_by_hand(travel: Any, seconds: float) -> None:
    messages = sent(1, 400, 1, 100)
    assert float(travel(WIRE, messages)) == pytest.approx(seconds)
    if travel is with_full_gradients:  # A rounded gradient.
        assert float(travel(WIRE, sent(1, 100, 1, 400))) == pytest.approx(1.5)
    assert float(through_server(WIRE, sent(0, 0, 1, 400))) == pytest.approx(0.9)


def run(method: str, form: str = "events", **options: Any) -> list[dict[str, Any]]:
    defaults = {"speeds": "delay", "dataset": "digits", "seconds": 0.5, "learning_rate": 0.3}
    given = {**defaults, **options}
    config = Stragglers(seconds=given.pop("seconds"), points=6)
    setting = {"dataset": given.pop("dataset"), "method": method, "form": form}
    setting["speeds"] = given.pop("speeds")
    return [*Trainer(config)(setting, 1, given, validation=False)]


@pytest.mark.slow
def test_synchronous_events_are_the_blocking_windows() -> None:
    """The same steps on the same clock: the engines share neither loop nor optimizer state."""
    windows = run("all_reduce", "blocking", minibatches=3, seconds=1.5)
    events = run("bulk_synchronous", minibatches=3, seconds=1.5)
    assert len(windows) == len(events) > 3
    for name, rel in (("seconds", 1e-5), ("train_loss", 1e-3), ("test_loss", 1e-3)):
        found, expected = ([point[name] for point in points] for points in (events, windows))
        assert found == pytest.approx(expected, rel=rel)
    assert events[-1]["mean_staleness"] > 0 and events[-1]["uploads"] == 1


@pytest.mark.slow
def test_no_backups_and_no_staleness_are_synchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lazy workers that always send, too. With equal workers, no step is half done at the end."""
    equal = Speeds("", lambda s: deterministic([s] * WORKERS))
    monkeypatch.setitem(SPEEDS, "equal", equal)
    # At the default rate, a last bit of a step is a tenth of the loss at the end.
    run_equal = functools.partial(run, speeds="equal", learning_rate=0.03)
    expected = run_equal("synchronous_server")
    for method, options in (("stale_synchronous", {"staleness": 0}), ("lag_wk", {"threshold": 0.0}),
                            ("backup_workers", {"backups": 0, "in_flight": "abort"})):  # fmt: skip
        found = run_equal(method, **options)
        assert found[-1]["train_loss"] == pytest.approx(expected[-1]["train_loss"], rel=1e-5)
        assert found[-1]["seconds"] == pytest.approx(expected[-1]["seconds"], rel=1e-5)


def smallest(method: str) -> dict[str, Any]:
    """The first values of the grid, with a learning rate that fits all."""
    axes = STUDY.grid(Stragglers(), {"dataset": "digits", "method": method})
    return {**{name: axis.values[0] for name, axis in axes.items()}, "learning_rate": 0.1}


SECONDS = {"asy_lpg": 4.0}  # It computes two gradients per step.


@pytest.mark.slow
@pytest.mark.parametrize("method", STRATEGIES)
def test_every_strategy_learns_and_waits_as_it_says(method: str) -> None:
    seconds = SECONDS.get(method, 2.0)
    points = run(method, speeds="exponential", seconds=seconds, **smallest(method))
    losses = [point["train_loss"] for point in points]
    assert losses[-1] < 0.9 * losses[0] < math.inf
    assert seconds / 2 < points[-1]["seconds"] <= seconds
    assert all(a["seconds"] < b["seconds"] for a, b in itertools.pairwise(points[:-1]))
    assert 0.1 < points[-1]["throughput"] < 1.1
    assert 0 < points[-1]["uploads"] <= 1
    # The dead worker needs a second for a gradient, and the others hundredths.
    dead = Stragglers(seconds=0.9 if not STRATEGIES[method].waits else 0.9 * 3 / 100, points=2)
    setting = {"dataset": "digits", "method": method, "form": "events", "speeds": "dead_slow"}
    *_, end = Trainer(dead)(setting, 0, smallest(method), validation=False)
    most = 2 * WORKERS * (1 + smallest(method).get("staleness", 0))
    assert (end["finished"] > 5 * most) != STRATEGIES[method].waits
