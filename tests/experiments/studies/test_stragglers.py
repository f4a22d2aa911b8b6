"""The study of stragglers: clocks, times of mini-batches, and training in all forms.

`test_straggler_events.py` has the methods of the event engine.
"""

from typing import Any

import jax
import numpy as np
import pytest

import experiments.methods.stragglers as methods
from experiments.methods.policies import EVENTS, STRATEGIES
from experiments.methods.stragglers import (
    BLOCKING,
    FINISH_LATE,
    FORMS,
    METHODS,
    NEW_TIME,
    SPEEDS,
    WORKERS,
    Speeds,
    forms_of,
)
from experiments.studies.stragglers import LINES, STUDY, Stragglers
from experiments.training.slow_workers import (
    BY_LABEL,
    Trainer,
    duration,
    load,
    settings,
)
from experiments.training.timeline import Link, Timeline, timeline
from experiments.training.windows import Program, make_shards
from jaxcomm.synchronization import deterministic, window_batches

LINK = Link(all_reduce=0.004, message=0.001, signal=0.0002)
SAME_TIME = "abort_same_time"


def clock(method: str, form: str, speeds: str, **options: Any) -> Timeline:
    """The timeline, for 10 ms per mini-batch."""
    defaults = {"seconds": 2.0, "minibatches": 4, "period": 1, "seed": 0}
    return timeline(method, form, speeds, LINK, minibatch_seconds=0.01, **{**defaults, **options})


@pytest.mark.parametrize(
    ("method", "form", "options", "seconds"),
    [
        # Four times 30 ms on slow workers, or 10 ms on fast ones, and communication.
        ("all_reduce", BLOCKING, {}, [0.124, 0.248]),
        ("all_reduce", SAME_TIME, {}, [0.0442, 0.0884]),
        ("all_reduce", FINISH_LATE, {"minibatches": 1}, [0.0142, 0.0284]),
        # The busiest worker of the graph has five neighbors, and sends to each.
        ("dpsgd", FINISH_LATE, {}, [0.0452, 0.0904]),
        # Workers wait at the end of a period.
        ("local_sgd", BLOCKING, {"minibatches": 1, "period": 2}, [0.03, 0.064]),
    ],
)
def test_clocks_by_hand(method: str, form: str, options: Any, seconds: list[float]) -> None:
    found = clock(method, form, "3:1", seconds=0.5, **options)
    np.testing.assert_allclose(found.seconds[:2], seconds, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_timeline_ends_at_the_time_and_has_at_least_one_step(method: str) -> None:
    for form in forms_of(method, "exponential"):
        found = clock(method, form, "exponential", minibatches=2, seconds=9.0)
        assert found.seconds[-1] <= 9.0 < found.seconds[-1] + 1
        assert (np.diff(found.seconds) > 0).all()
        assert (np.diff(found.window.first, axis=0) == found.window.finished[:-1]).all()
        shorter = clock(method, form, "exponential", minibatches=2, seconds=1e-9)
        assert len(shorter.seconds) == 1
        assert shorter.seconds[0] == found.seconds[0]


@pytest.mark.slow
def test_a_restarted_mini_batch_keeps_its_time() -> None:
    """A worker whose mini-batch is long restarts it until a window is long enough."""
    window = clock("all_reduce", SAME_TIME, "pareto", minibatches=1, seconds=4.0).window
    longest: dict[tuple[int, int], float] = {}
    for length, first, finished in zip(window.seconds, window.first, window.finished, strict=True):
        for place, ended in zip(enumerate(first.tolist()), finished, strict=True):
            before = longest.get(place, 0)
            if not ended:
                longest[place] = max(before, length)
            else:  # It was in no shorter window, nor aborted in one of the same length.
                assert before < length * (1 + 1e-5)
    assert len(longest) > 20


def test_aborted_work_is_charged() -> None:
    # In a window of 40 ms, a slow worker finishes one mini-batch and aborts 10 ms of the next.
    found = clock("all_reduce", SAME_TIME, "3:1")
    np.testing.assert_allclose(found.aborted[:3], 4 * 0.01 * np.arange(1, 4), rtol=1e-4)
    for form in (BLOCKING, FINISH_LATE):
        assert not clock("all_reduce", form, "3:1").aborted.any()
    starved = clock("all_reduce", SAME_TIME, "3:1", minibatches=1)
    assert not starved.window.finished[:, 4:].any()


def test_the_forms_differ_only_if_times_are_random() -> None:
    for name, speeds in SPEEDS.items():
        forms = forms_of("dpsgd", name)
        assert (NEW_TIME in forms) == speeds.is_random
        assert forms_of("local_sgd", name) == [BLOCKING] and {*forms} <= {*FORMS}
        means = speeds.straggler(0.01).means(WORKERS)
        assert means.max() / means.min() == pytest.approx(speeds.slowdown)
        assert means.argmax() in (0, 4, 7)  # The slow worker is one of the slowest.
        assert means[methods.SLOW_WORKER] == means.max()


def test_only_methods_that_wait_for_a_dead_worker_take_longer() -> None:
    config = Stragglers(seconds=3.0)
    for each in settings(config):
        waits = each["form"] == BLOCKING
        if each["form"] == EVENTS:
            waits = STRATEGIES[each["method"]].waits
        seconds = config.text_seconds if each["dataset"] == "text" else 3.0
        is_longer = each["speeds"] == "dead_slow" and waits
        assert duration(config, each) == pytest.approx(100 if is_longer else seconds)


def test_shards_by_label() -> None:
    task = load("digits", validation=False)
    for by_label, most in ((False, 10), (True, 3)):
        _, labels = make_shards(task, 0, by_label=by_label)
        assert len(labels) == WORKERS
        assert max(len(np.unique(shard)) for shard in labels) == most
    assert load(BY_LABEL, validation=True) is load("digits", validation=True)


def run(form: str, method: str = "all_reduce", speeds: str = "equal") -> list[dict[str, Any]]:
    config = Stragglers(seconds=0.2, points=3, minibatch_seconds=0.01)
    setting = {"dataset": "digits", "speeds": speeds, "method": method, "form": form}
    parameters = {"learning_rate": 0.3, "minibatches": 2}
    return [*Trainer(config)(setting, 0, parameters, validation=False)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["all_reduce", "dpsgd"])
def test_forms_are_the_same_with_equal_workers(method: str, monkeypatch: Any) -> None:
    equal = Speeds("", lambda s: deterministic([s] * WORKERS))
    monkeypatch.setitem(SPEEDS, "equal", equal)
    forms = [BLOCKING, SAME_TIME, FINISH_LATE] if method == "all_reduce" else [BLOCKING, SAME_TIME]
    blocking, *others = [run(form, method) for form in forms]
    for other in others:
        for point, expected in zip(other[:2], blocking[:2], strict=True):
            assert point["finished"] == expected["finished"]
            assert point["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-4)
            assert point["seconds"] > expected["seconds"]  # By the signal.


@pytest.mark.slow
def test_all_mini_batches_of_a_window_have_its_parameters_and_late_ones_older() -> None:
    """A fast worker beside slow ones: gradients against those of plain SGD, by hand."""
    task = load("digits", validation=False)
    when = clock("all_reduce", FINISH_LATE, "3:1", minibatches=1, seconds=0.1)
    shards = make_shards(task, 0)
    program = Program(task, METHODS["all_reduce"], 16)
    trained = [jax.device_get(w) for w in program.train(when, [1, 2, 3], shards, 0.1, 1, 0)]
    # The slow workers finish their first mini-batch in the third window; it began at the start.
    np.testing.assert_array_equal(when.window.finished[:3, 4:].sum(axis=1), [0, 0, 4])
    before = [task.first_weights(0), *trained]
    gradient = jax.jit(jax.grad(task.loss))
    for window, workers in ((0, 4), (2, 8)):
        first = when.window.first[window]
        batches = window_batches(jax.random.key(0), shards, first, minibatches=1, batch_size=16)
        gradients = [
            gradient(before[window if n < 4 else 0], jax.tree.map(lambda x, n=n: x[n], batches))
            for n in range(workers)
        ]
        expected = jax.tree.map(lambda w, *g: w - 0.1 * sum(g) / len(g), before[window], *gradients)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), trained[window], expected
        )


def test_the_settings_of_the_full_study() -> None:
    found = settings(Stragglers())
    assert len({tuple(setting.values()) for setting in found}) == 128 + len(STRATEGIES) * 11
    for setting in found:  # Every method is tuned over two parameters or three.
        assert len(STUDY.grid(Stragglers(), setting)) in (2, 3)
    assert {f"{setting['method']} {setting['form']}" for setting in found} <= {*LINES}
