"""Windows: when they close, what is finished, and that no mini-batch is lost or repeated."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcomm.synchronization import (
    Trigger,
    all_workers,
    deadline,
    fastest_worker,
    k_batch_sync,
    k_sync,
)
from jaxcomm.synchronization._windows import close_window, new_queue
from tests.slow import slow

TIMES = jnp.array([[1.0, 1.0, 1.0, 1.0], [3.0, 3.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0]])
closed = jax.jit(close_window, static_argnames=("trigger", "in_flight"))

TRIGGERS = {
    "all_workers": (all_workers(), 12, [4, 4, 4]),
    "fastest_worker": (fastest_worker(), 4, [4, 1, 2]),
    "k_sync": (k_sync(2), 8, [4, 2, 4]),
    "deadline": (deadline(6.5), 6.5, [4, 2, 3]),
    "a late deadline": (deadline(100.0), 12, [4, 4, 4]),
    "k_batch_sync": (k_batch_sync(5), 3, [3, 1, 1]),
}


@pytest.mark.parametrize("name", ["k_batch_sync", *map(slow, [*TRIGGERS][:-1])])
def test_triggers_match_a_hand_calculation(name: str) -> None:
    trigger, seconds, finished = TRIGGERS[name]
    window, queue = closed(new_queue(3), TIMES, trigger, in_flight="abort")
    assert window.seconds == seconds
    np.testing.assert_array_equal(window.finished, finished)
    np.testing.assert_array_equal(queue.position, finished)
    np.testing.assert_array_equal(queue.remaining_seconds, 0)


def test_work_in_flight_continues_or_restarts() -> None:
    first = fastest_worker()
    _, aborted = closed(new_queue(3), TIMES, first, in_flight="abort")
    _, late = closed(new_queue(3), TIMES, first)
    # The third has just finished one as the window closes, and has not begun another.
    np.testing.assert_array_equal(late.remaining_seconds, [0, 2, 0])
    # The second window of 4 seconds: 3 + (1 left over), or 2 and then 2 of another 3.
    restarted, _ = closed(aborted, TIMES, first, in_flight="abort")
    on, after = closed(late, TIMES, first, in_flight="finish_late")
    np.testing.assert_array_equal(restarted.finished, [4, 1, 2])
    np.testing.assert_array_equal(on.finished, [4, 1, 2])
    np.testing.assert_array_equal(after.remaining_seconds, [0, 1, 0])
    third, _ = closed(after, TIMES, first, in_flight="finish_late")
    np.testing.assert_array_equal(third.finished, [4, 2, 2])


@functools.cache
def _windows(trigger: Any, in_flight: Any) -> Any:
    """Windows one after the other: times [windows, workers, M]."""

    @jax.jit
    def scan(times: jax.Array) -> Any:
        def body(queue: Any, times: jax.Array) -> Any:
            window, queue = close_window(queue, times, trigger, in_flight=in_flight)
            return queue, window

        return jax.lax.scan(body, new_queue(times.shape[1]), times)

    return scan


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1),
    trigger=st.sampled_from(
        ["all_workers", "fastest_worker", "k_sync", "deadline", "k_batch_sync"]
    ),
    in_flight=st.sampled_from(["abort", "finish_late"]),
)
def test_no_minibatch_is_lost_or_repeated(seed: int, trigger: str, in_flight: str) -> None:
    rng = np.random.default_rng(seed)
    speeds = rng.uniform(0.2, 5, size=(1, 3, 1))
    times = (speeds * rng.exponential(size=(40, 3, 4))).astype(np.float32)
    queue, windows = _windows(TRIGGERS[trigger][0], in_flight)(times)
    for worker in range(3):
        done = [
            first + j
            for first, count in zip(
                np.asarray(windows.first)[:, worker], np.asarray(windows.finished)[:, worker],
                strict=True,
            )
            for j in range(count)
        ]  # fmt: skip
        assert done == [*range(int(queue.position[worker]))]
    waits_for_all = times.sum(axis=2).max(axis=1)
    assert (np.asarray(windows.seconds) > 0).all()
    if in_flight == "abort":
        assert (np.asarray(windows.seconds) <= waits_for_all * (1 + 1e-5)).all()


MOST = 24


@functools.cache
def _equal_times(in_flight: Any) -> Any:
    """Three windows of mini-batches that always take as long, [workers] each."""

    @jax.jit
    def run(each: jax.Array, seconds: jax.Array) -> Any:
        trigger = Trigger(lambda done: jnp.minimum(seconds, jnp.max(done)))
        times = jnp.broadcast_to(each[:, None], (3, MOST))

        def body(queue: Any, _: None) -> Any:
            window, queue = close_window(queue, times, trigger, in_flight=in_flight)
            return queue, (window.finished, window.stale, queue.remaining_seconds)

        return jax.lax.scan(body, new_queue(3), length=3)[1]

    return run


@settings(max_examples=200, deadline=None)
@given(
    each=st.floats(1e-4, 1e4),
    count=st.integers(6, MOST),
    ratio=st.sampled_from([2, 3, 5, 6]),
    in_flight=st.sampled_from(["abort", "finish_late"]),
)
def test_a_deadline_at_a_multiple_loses_no_minibatch(
    each: float, count: int, ratio: int, in_flight: str
) -> None:
    """Whatever floats make of 3 x 0.3 and of 0.1 + 0.1 + 0.1."""
    budget = count * ratio  # In units of which mini-batches of the three take `ratio`, 1 and 2.
    unit = each / ratio
    speeds = np.array([ratio, ratio * count, ratio * (count + 1)]) * unit
    finished, late, left = _equal_times(in_flight)(
        speeds.astype(np.float32), np.float32(budget * unit)
    )
    np.testing.assert_array_equal(np.asarray(finished)[:, :2], [[count, 1]] * 3)
    np.testing.assert_array_equal(np.asarray(late)[:, :2], False)
    np.testing.assert_array_equal(np.asarray(left)[:, :2], 0)
    going_on = [0, 1, 1] if in_flight == "finish_late" else [0, 0, 0]
    np.testing.assert_array_equal(np.asarray(finished)[:, 2], going_on)
