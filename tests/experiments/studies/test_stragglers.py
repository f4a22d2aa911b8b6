"""The study of stragglers: clocks by hand, and laws between forms, methods and engines."""

import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.studies._events import STRATEGIES, all_reduced, both_ways, through_server
from experiments.studies._windows import (
    BANDWIDTH,
    FORMS,
    SLOW_WORKER,
    SPEEDS,
    WORKERS,
    Link,
    Speeds,
    forms_of,
    program,
    timeline,
)
from experiments.studies.stragglers import (
    STRAGGLERS,
    Stragglers,
    duration,
    load,
    make_shards,
    settings,
    train,
)
from jaxcomm.synchronization import deterministic, window_batches
from jaxcomm.synchronization.events import sent

LINK = Link(all_reduce=0.004, message=0.001)
EQUAL = Speeds("", deterministic([0.01] * WORKERS))


def clock(method: str, form: str, speeds: str, **options: Any) -> Any:
    defaults = {"seconds": 2.0, "minibatches": 4, "period": 1, "seed": 0}
    return timeline(method, form, speeds, LINK, **{**defaults, **options})


@pytest.mark.parametrize(
    ("method", "form", "options", "seconds"),
    [
        # Four times 30 ms on slow workers, or 10 ms on fast ones; 0.2 ms for the signal.
        ("all_reduce", "blocking", {}, [0.124, 0.248]),
        ("all_reduce", "abort_same_time", {}, [0.0442, 0.0884]),
        ("all_reduce", "finish_late", {"minibatches": 1}, [0.0142, 0.0284]),
        # The busiest worker of the graph has five neighbors, and sends to each.
        ("dpsgd", "finish_late", {}, [0.0452, 0.0904]),
        # Workers wait at the end of a period.
        ("local_sgd", "blocking", {"minibatches": 1, "period": 2}, [0.03, 0.064]),
    ],
)
def test_clocks_by_hand(method: str, form: str, options: Any, seconds: list[float]) -> None:
    _, ends = clock(method, form, "3:1", seconds=0.5, **options)
    np.testing.assert_allclose(ends[:2], seconds, rtol=1e-5)
    assert ends[-1] <= 0.5 and len(clock(method, form, "3:1", seconds=1e-9)[1]) == 1


@pytest.mark.slow
def test_a_restarted_mini_batch_keeps_its_time() -> None:
    """A worker whose mini-batch is long restarts it until a window is long enough."""
    steps, ends = clock("all_reduce", "abort_same_time", "pareto", minibatches=1, seconds=4.0)
    window, longest = steps.window, {}
    for step in range(len(ends)):
        for place, ended in zip(enumerate(window.first[step]), window.finished[step], strict=True):
            before = longest.get(place, 0)
            if not ended:
                longest[place] = max(before, window.seconds[step])
            else:  # It was in no shorter window, nor aborted in one of the same length.
                assert before < window.seconds[step] * (1 + 1e-5)
    assert len(longest) > 20


def test_the_settings_of_the_full_study() -> None:
    config = Stragglers(seconds=4.0)
    found = settings(config)
    assert len({tuple(setting.values()) for setting in found}) == 128 + len(STRATEGIES) * 11
    for each in found:  # Only methods that wait for a dead worker take longer.
        assert len(STRAGGLERS.grid(config, each)) in (2, 3)
        form = FORMS.get(each["form"], STRATEGIES.get(each["method"]))
        seconds = 3.0 if each["dataset"] == "text" else 4.0
        longer = 100 / 3 if each["speeds"] == "dead_slow" and form.waits else 1
        assert duration(config, each) == pytest.approx(seconds * longer)
    for name, speeds in SPEEDS.items():
        assert ("abort_new_time" in forms_of("dpsgd", name)) == speeds.is_random
        means = speeds.straggler.means(WORKERS)
        assert means[SLOW_WORKER] / means.min() == pytest.approx(speeds.slowdown)


def test_shards_by_label() -> None:
    for by_label, most in ((False, 10), (True, 3)):
        _, labels = make_shards(load("digits")[0], 0, by_label=by_label)
        assert max(len(np.unique(shard)) for shard in labels) == most


def run(method: str, form: str = "events", **options: Any) -> list[dict[str, Any]]:
    given = {"speeds": "equal", "seconds": 0.5, "points": 6, "learning_rate": 0.3, **options}
    config = Stragglers(seconds=given.pop("seconds"), points=given.pop("points"))
    setting = {"dataset": "digits", "method": method, "form": form, "speeds": given.pop("speeds")}
    return [*train(config, setting)(setting, 1, given, validation=False)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["all_reduce", "dpsgd"])
def test_forms_are_the_same_with_equal_workers(method: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(SPEEDS, "equal", EQUAL)
    forms = ["blocking", "abort_same_time", "finish_late"][: 3 if method == "all_reduce" else 2]
    blocking, *others = [run(method, form, seconds=0.2, points=3, minibatches=2) for form in forms]
    for other in others:
        for point, expected in zip(other, blocking, strict=False):
            assert point["step"] == expected["step"]
            assert point["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-4)
            assert point["seconds"] > expected["seconds"]  # By the signal.


@pytest.mark.slow
def test_all_mini_batches_of_a_window_have_its_parameters_and_late_ones_older() -> None:
    """A fast worker beside slow ones: gradients against those of plain SGD, by hand."""
    task, _ = load("digits")
    steps, _ = clock("all_reduce", "finish_late", "3:1", minibatches=1, seconds=0.1)
    shards = jax.tree.map(jnp.asarray, make_shards(task, 0, by_label=False))
    options = jnp.float32(0.1), jnp.int32(0), jnp.int32(1)
    first = task.first_weights(0)
    states = program(task, "all_reduce")(first, options, shards, steps, np.arange(1, 4))
    before = [first, *(jax.tree.map(lambda x, n=n: x[n], states) for n in range(3))]
    # The slow workers finish their first mini-batch in the third window; it began at the start.
    np.testing.assert_array_equal(steps.window.finished[:3, 4:].sum(axis=1), [0, 0, 4])
    gradient = jax.jit(jax.grad(task.loss))
    for window, workers in ((0, 4), (2, 8)):
        number = steps.window.first[window]
        batches = window_batches(jax.random.key(0), shards, number, minibatches=1, batch_size=16)
        gradients = [
            gradient(before[window if n < 4 else 0], jax.tree.map(lambda x, n=n: x[n], batches))
            for n in range(workers)
        ]
        expected = jax.tree.map(lambda w, *g: w - 0.1 * sum(g) / len(g), before[window], *gradients)
        for found, wanted in zip(
            *map(jax.tree.leaves, (before[window + 1], expected)), strict=True
        ):
            np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_seconds_of_messages_by_hand() -> None:
    inputs, messages = SimpleNamespace(all_reduce=7.0), sent(1, 12_500_000, 1, 25_000_000)
    for travel, seconds in ((through_server, 3.0004), (both_ways, 1.0002), (all_reduced, 7.0)):
        assert float(travel(inputs, messages)) == pytest.approx(seconds)


@pytest.mark.slow
def test_synchronous_events_are_the_blocking_windows() -> None:
    """The same steps on the same clock: the engines share neither loop nor optimizer state."""
    given = {"speeds": "delay", "minibatches": 3, "seconds": 1.5}
    windows, events = run("all_reduce", "blocking", **given), run("bulk_synchronous", **given)
    assert len(windows) == len(events) > 3
    for name, rel in (("seconds", 1e-5), ("train_loss", 1e-3), ("test_loss", 1e-3)):
        found, expected = ([point[name] for point in points] for points in (events, windows))
        assert found == pytest.approx(expected, rel=rel)
    assert events[-1]["mean_staleness"] > 0 and events[-1]["uploads"] == 1


@pytest.mark.slow
def test_no_backups_and_no_staleness_are_synchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lazy workers that always send, too. With equal workers, no step is half done at the end."""
    monkeypatch.setitem(SPEEDS, "equal", EQUAL)
    # At the default rate, a last bit of a step is a tenth of the loss at the end.
    *_, expected = run("synchronous_server", learning_rate=0.03)
    for method, options, bytes_more in (
        ("stale_synchronous", {"staleness": 0}, 0),
        ("lag_wk", {"threshold": 0.0}, 5 + 8),  # the first bytes of an upload, and of a round
        ("backup_workers", {"backups": 0, "in_flight": "abort"}, 0),
    ):
        *_, found = run(method, learning_rate=0.03, **options)
        assert found["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-5)
        later = found["step"] / WORKERS * bytes_more / BANDWIDTH
        assert found["seconds"] == pytest.approx(expected["seconds"] + later, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", STRATEGIES)
def test_every_strategy_learns_and_waits_as_it_says(method: str) -> None:
    grid = STRAGGLERS.grid(Stragglers(), {"dataset": "digits", "method": method})
    smallest = {**{name: axis.values[0] for name, axis in grid.items()}, "learning_rate": 0.1}
    seconds = 2.0 * STRATEGIES[method].evaluations
    points = run(method, speeds="exponential", seconds=seconds, **smallest)
    losses = [point["train_loss"] for point in points]
    assert losses[-1] < 0.9 * losses[0] < math.inf
    assert seconds / 2 < points[-1]["seconds"] <= seconds
    assert 0 < points[-1]["uploads"] <= 1
    # The dead worker needs a second for a gradient, and the others hundredths.
    waits = STRATEGIES[method].waits
    *_, end = run(method, speeds="dead_slow", seconds=0.027 if waits else 0.9, points=2, **smallest)
    most = 2 * WORKERS * (1 + smallest.get("staleness", 0))
    assert (end["step"] > 5 * most) != waits
