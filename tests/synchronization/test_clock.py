"""Windows and meetings on a clock: against closed forms, by hand, and what they never do."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest

from jaxcomm import gossip
from jaxcomm.synchronization import (
    all_workers,
    barrier_run_time,
    deadline,
    deterministic,
    fastest_worker,
    global_barrier,
    k_sync,
    neighbor_barrier,
    pareto,
    recorded_times,
    run_time,
    shifted_exponential,
    wait_at_barrier,
    windows,
    windows_run_time,
)
from jaxcomm.synchronization._clock import Windows
from tests.gossip.workers import flags_of
from tests.slow import slow

TWO_SPEEDS = deterministic([1.0] * 4 + [3.0] * 4)


def compiled(*args: Any, **options: Any) -> Windows:
    """The clock, whose windows are closed by one program."""
    start, close = windows(*args, **options)
    return Windows(start, jax.jit(close))


@pytest.mark.parametrize(
    ("straggler", "waits_for"),
    [(shifted_exponential(1.0, shift=0.5), 6), slow(pareto(1.0, 4.0), 8)],
)
def test_windows_match_the_closed_form(straggler: Any, waits_for: int) -> None:
    # Backup workers: late gradients are dropped.
    machine = windows(
        straggler,
        k_sync(waits_for),
        workers=8,
        minibatches=1,
        communication_seconds=0.25,
        in_flight="abort",
    )
    found = windows_run_time(machine, 20_000)
    expected = run_time(straggler, 8, waits_for, communication_seconds=0.25)
    np.testing.assert_allclose(found.seconds_per_update, expected.seconds_per_update, rtol=0.02)
    np.testing.assert_allclose(
        found.minibatches_per_second, expected.minibatches_per_second, rtol=0.02
    )


def test_slow_half_of_the_workers_halves_the_throughput() -> None:
    """The 2x of the paper: what never waits against what always does."""
    waiting = windows_run_time(windows(TWO_SPEEDS, all_workers(), workers=8, minibatches=12), 100)
    late = windows(TWO_SPEEDS, fastest_worker(), workers=8, minibatches=12)
    assert waiting.seconds_per_update == 36
    gain = windows_run_time(late, 100).minibatches_per_second / waiting.minibatches_per_second
    np.testing.assert_allclose(gain, 2, rtol=1e-6)
    closed = (1 / TWO_SPEEDS.means(8)).sum() / run_time(TWO_SPEEDS, 8, 8).minibatches_per_second
    np.testing.assert_allclose(closed, 2)


def test_windows_without_a_finished_minibatch_are_counted() -> None:
    # The trace of times is drawn so that a deadline of 1.5 is too short in every second window.
    def draw(key: jax.Array, step: jax.Array, shape: tuple[int, int]) -> jax.Array:
        return jnp.where(step % 2 == 0, jnp.ones(shape), 2 * jnp.ones(shape))

    changing = TWO_SPEEDS._replace(sample=draw)
    clock, close = compiled(changing, deadline(1.5), workers=8, minibatches=2, in_flight="abort")
    for _ in range(4):
        window, clock = close(clock)
    assert (clock.windows, clock.idle, clock.minibatches, clock.seconds) == (4, 2, 16, 6)
    np.testing.assert_array_equal(window.finished, 0)
    np.testing.assert_array_equal(clock.starved, 2)


@pytest.mark.parametrize("trigger", [fastest_worker(), deadline(2.5)])
def test_workers_that_finish_nothing_are_handled_by_each_policy(trigger: Any) -> None:
    one_slow = deterministic([1.0, 1.0, 1.0, 3.0])
    start, close = compiled(one_slow, trigger, workers=4, minibatches=2)
    clock, total = start, np.zeros(4)
    for _ in range(60):
        window, clock = close(clock)
        total += np.asarray(window.finished)
    np.testing.assert_array_equal(total, [120, 120, 120, clock.seconds / 3])
    np.testing.assert_array_equal(clock.starved, 0)
    with pytest.raises(ValueError, match=r"starves the workers \[3\]"):
        windows(one_slow, trigger, workers=4, minibatches=2, in_flight="abort")
    drawn = one_slow._replace(period=None)
    clock, close = compiled(drawn, trigger, workers=4, minibatches=2, in_flight="abort")
    for _ in range(5):
        window, clock = close(clock)
    np.testing.assert_array_equal(clock.starved, [0, 0, 0, 5])
    assert clock.idle == 0


def test_a_trace_starves_workers_too_slow_in_all_windows(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "times.csv"
    file.write_text("1,9,9\n1,9,1\n")
    with pytest.raises(ValueError, match=r"starves the workers \[1\]"):
        windows(recorded_times(file), fastest_worker(), workers=3, minibatches=2, in_flight="abort")


def test_the_clock_sums_windows_with_one_rounding() -> None:
    times = deterministic([0.1, 0.3])
    machine = windows(times, deadline(0.3), workers=2, minibatches=4, communication_seconds=1e-3)
    total = windows_run_time(machine, 100_000)
    each = float(np.float32(0.3)) + float(np.float32(1e-3))
    np.testing.assert_allclose(total.seconds_per_update, each, rtol=2e-7)
    np.testing.assert_allclose(total.minibatches_per_second, 4 / each, rtol=2e-7)


def test_local_steps_wait_for_all_and_gossip_for_neighbors() -> None:
    work = jnp.array([1.0, 2.0, 5.0, 1.0])
    local = global_barrier(4, period=2, seconds=0.5)
    alone = wait_at_barrier(jnp.zeros(4), work, local(jnp.int32(0)))
    np.testing.assert_array_equal(alone, work)
    np.testing.assert_array_equal(wait_at_barrier(alone, work, local(jnp.int32(1))), [10.5] * 4)
    path = neighbor_barrier(nx.path_graph(4), seconds=0.5)(jnp.int32(0))
    np.testing.assert_array_equal(wait_at_barrier(jnp.zeros(4), work, path), [2.5, 6.0, 6.0, 5.5])


def test_a_slow_worker_slows_a_ring_later() -> None:
    ring, times = neighbor_barrier(gossip.ring(8)), [1.0] * 7 + [3.0]
    found = barrier_run_time(deterministic(times), ring, 8, updates=1000).seconds_per_update
    np.testing.assert_allclose(found, 3, rtol=1e-3)
    clocks = jnp.zeros(8)
    for step in range(3):
        clocks = wait_at_barrier(clocks, jnp.array(times), ring(jnp.int32(step)))
    np.testing.assert_array_equal(clocks, [9, 7, 5, 3, 5, 7, 9, 9])


@pytest.mark.slow
def test_the_clock_of_matcha_draws_what_matcha_does() -> None:
    plan = gossip.matcha_plan(gossip.ring(4), 0.5)
    drawn = flags_of(gossip.to_mixing(plan), 12, seed=3).sum(axis=1)
    meetings = neighbor_barrier(plan, seconds=1.0, seed=3)
    for number, rounds in enumerate(drawn):
        # On a ring, each of two matchings has every worker in it.
        heard = meetings(jnp.int32(number))
        np.testing.assert_array_equal(heard.seconds, [rounds] * 4)
        np.testing.assert_array_equal(heard.waits_for.sum(axis=1) - 1, heard.seconds)
    assert len({*drawn}) > 1


def eight(trigger: Any) -> Windows:
    return windows(TWO_SPEEDS, trigger, workers=8, minibatches=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: eight(k_sync(9)), "`k_sync` waits for 9"),
        (lambda: eight(deadline(0.5)), "No mini-batch ends within a deadline of 0.5 s"),
        (lambda: run_time(TWO_SPEEDS, 8, 9), "`waits_for` must be 1 to 8"),
    ],
)
def test_mistakes(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
