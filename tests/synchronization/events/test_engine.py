"""The engine: its clock, its order, and what an event costs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcomm.synchronization import (
    Straggler,
    all_workers,
    deterministic,
    events,
    k_sync,
    run_time,
    shifted_exponential,
    windows,
)
from jaxcomm.synchronization.events import Event, Policy
from jaxcomm.synchronization.events._engine import EventLoop, Seconds, first, last, later
from tests.slow import slow
from tests.synchronization.events.problem import halved
from tests.synchronization.events.rows import PLAIN, Row


def compiled(policy: Policy, straggler: Straggler, **options: Any) -> EventLoop:
    loop = events.event_loop(policy, halved, straggler, **options)
    return loop._replace(run=jax.jit(loop.run, static_argnums=1))


def test_seconds_are_summed_in_48_bits() -> None:
    steps = np.random.default_rng(0).exponential(size=20_000).astype(np.float32)
    start = Seconds(jnp.float32(3e6), jnp.float32(0))

    @jax.jit
    def total(steps: jax.Array) -> Seconds:
        return jax.lax.scan(lambda time, step: (later(time, step), ()), start, steps)[0]

    found = total(steps)
    expected = 3e6 + np.sum(steps.astype(np.float64))
    assert abs(float(found.high) + float(found.low) - expected) < 1e-5
    assert abs(float(found.high) - expected) > 1e-3, "float32 alone would do"


def test_events_are_ordered_by_both_words_then_by_index() -> None:
    high = jnp.float32([2, 1, 1, 1, 0])
    time = Seconds(high, jnp.float32([0, 3e-8, -2e-8, -2e-8, 0]))
    among = jnp.array([True, True, True, True, False])
    assert first(time, among) == 2
    assert last(time, among).high == 2
    assert last(time, jnp.array([False, True, True, True, False])).low == jnp.float32(3e-8)


@pytest.mark.parametrize("backups", [2, slow(0)])
def test_the_clock_equals_that_of_windows(backups: int) -> None:
    straggler, workers, steps = shifted_exponential(2.0, shift=0.5), 6, 400
    policy = events.backup_workers(optax.sgd(0.1), backups, in_flight="abort")
    loop = compiled(policy, straggler, workers=workers, communication_seconds=0.25, seed=3)
    wanted = workers - backups
    _, records = loop.run(loop.start(jnp.ones(2)), wanted * steps)
    trigger = k_sync(wanted) if backups else all_workers()
    clock, close = windows(
        straggler, trigger, workers=workers, minibatches=1, communication_seconds=0.25,
        in_flight="abort", seed=3,
    )  # fmt: skip

    def closed(clock: Any, _: None) -> Any:
        clock = close(clock)[1]
        return clock, clock.seconds

    ends = jax.jit(lambda clock: jax.lax.scan(closed, clock, length=steps)[1])(clock)
    seconds = records.seconds[wanted - 1 :: wanted] + 0.25
    np.testing.assert_allclose(seconds, ends, rtol=1e-5)
    expected = run_time(straggler, workers, wanted, communication_seconds=0.25)
    assert abs(float(ends[-1]) / steps / expected.seconds_per_update - 1) < 0.06


def test_runs_are_reproducible_and_resumable() -> None:
    policy = events.parameter_server(optax.sgd(0.1, momentum=0.9))
    loop = compiled(policy, shifted_exponential(1.0), workers=5)
    start = loop.start(jnp.ones(3))
    half, records = loop.run(start, 20)
    after, more = loop.run(half, 20)
    again, _ = loop.run(loop.run(start, 20)[0], 20)
    jax.tree.map(np.testing.assert_array_equal, after, again)
    assert after.events == 40 and more.seconds[0] >= records.seconds[-1]
    assert (np.diff(np.concatenate([records.seconds, more.seconds])) >= 0).all()
    other = compiled(policy, shifted_exponential(1.0), workers=5, seed=1)
    assert (other.start(jnp.ones(3)).due.high != start.due.high).all()


@pytest.mark.parametrize("row", PLAIN, ids=repr)
def test_donating_progress_keeps_the_parameters(row: Row) -> None:
    params = jnp.zeros(3)
    loop = events.event_loop(row.policy(4), row.plain, row.straggler, workers=4)
    run = jax.jit(loop.run, static_argnums=1, donate_argnums=0)
    progress, _ = run(loop.start(params), 2)
    run(progress, 2)
    np.testing.assert_array_equal(params, 0)


def test_ties_are_broken_by_index() -> None:
    loop = compiled(events.parameter_server(optax.sgd(0.1)), deterministic([0.1] * 3), workers=3)
    _, records = loop.run(loop.start(jnp.ones(2)), 9)
    assert records.worker.tolist() == [0, 1, 2] * 3
    assert records.staleness.tolist() == [0, 1, 2] + [2] * 6


def test_nonfinite_gradients_are_reported() -> None:
    def broken(point: jax.Array, event: Event) -> tuple[jax.Array, jax.Array]:
        return jnp.float32(0), jnp.where((event.worker == 1) & (event.number == 2), jnp.nan, point)

    finals = []
    for tx in (optax.sgd(0.1), optax.apply_if_finite(optax.sgd(0.1), 5)):
        policy = events.parameter_server(tx)
        loop = events.event_loop(policy, broken, deterministic([1.0, 1.0]), workers=2)
        progress, _ = jax.jit(loop.run, static_argnums=1)(loop.start(jnp.ones(2)), 12)
        finals.append(np.isfinite(np.asarray(loop.model(progress))).all())
    assert finals == [False, True]


@pytest.mark.parametrize("row", PLAIN, ids=repr)
def test_parameters_keep_their_dtypes(row: Row) -> None:
    assert row.plain is not None
    params = {"a": jnp.ones(4, jnp.bfloat16), "b": jnp.ones((1, 2), jnp.bfloat16)}
    loop = events.event_loop(row.policy(4), row.plain, row.straggler, workers=4)
    found = jax.eval_shape(lambda params: loop.model(loop.run(loop.start(params), 3)[0]), params)
    assert found == jax.eval_shape(lambda: params)


def temporaries(row: Row, workers: int, size: int) -> int:
    """The bytes of temporaries of the compiled program of a few events."""
    assert row.plain is not None
    loop = events.event_loop(
        row.policy(workers), row.plain, shifted_exponential(1.0), workers=workers
    )
    progress = jax.eval_shape(loop.start, jax.ShapeDtypeStruct((size,), jnp.float32))
    run = jax.jit(loop.run, static_argnums=1, donate_argnums=0)
    memory = run.lower(progress, 8).compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


@pytest.mark.parametrize("row", [row for row in PLAIN if not row.grows], ids=repr)
def test_an_event_copies_no_array_of_all_workers(row: Row) -> None:
    # A copy would take 4 x 512 x 2048 = 4 MiB.
    assert temporaries(row, 512, 2048) - temporaries(row, 8, 2048) < 2**17


def test_a_deadlock_is_reported() -> None:
    server = events.parameter_server(optax.sgd(0.1))
    stuck = server._replace(begins=lambda state, idle: idle & (state.params[0] == 1))
    loop = compiled(stuck, shifted_exponential(1.0), workers=3)
    _, records = loop.run(loop.start(jnp.ones(2)), 10)
    assert np.isfinite(records.seconds[:3]).all() and np.isnan(records.seconds[3:]).all()


def test_an_event_sends_what_is_given() -> None:
    assert events.sent() == (0, 0, 0, 0)
    assert events.sent(upload_bytes=5) == (0, 5, 0, 0)
