"""Training over windows: nothing is lost over epochs, whatever aggregates, and stale by one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxcomm
from jaxcomm import gossip
from jaxcomm.compression.quantizers import dither
from jaxcomm.synchronization import (
    all_workers,
    deadline,
    deterministic,
    fastest_worker,
    k_batch_sync,
    pareto,
    scale_by_finished,
    shifted_exponential,
    stale_params,
    window_batches,
    window_gradients,
    windows,
)
from tests.slow import slow
from tests.workers import mesh_of

N, M, SIZE, EXAMPLES = 4, 3, 2, 7
SHARDS = np.random.default_rng(0).normal(size=(N, EXAMPLES, 3)).astype(np.float32)
MACHINES = {
    f"{trigger} {in_flight}": windows(
        straggler, closes, workers=N, minibatches=M, in_flight=in_flight, seed=1
    )
    for straggler in [shifted_exponential(mean=1.0)]
    for trigger, closes, in_flight in [
        ("first", fastest_worker(), "abort"),
        ("total", k_batch_sync(5), "finish_late"),
    ]
} | {
    name: windows(times, closes, workers=N, minibatches=M, in_flight="abort")
    for name, times, closes in [
        ("deadline", pareto(0.5, 1.5), deadline(1.2)),
        # Where times are drawn, that somebody finishes nothing is no mistake.
        ("speeds", deterministic([1.0, 3.0, 2.0, 9.0])._replace(period=None), fastest_worker()),
    ]
}


def loss(x: jax.Array, batch: jax.Array) -> jax.Array:
    return 0.5 * jnp.mean(jnp.sum((x[None] - batch) ** 2, axis=-1))


@functools.cache
def _dealt(name: str) -> Any:
    """Rows and counts of 60 windows, by name of the machine."""
    numbered = np.arange(N * EXAMPLES).reshape(N, EXAMPLES)

    @jax.jit
    def run(key: jax.Array) -> Any:
        def body(clock: Any, _: None) -> Any:
            window, clock = MACHINES[name].close(clock)
            batch = window_batches(key, numbered, window.first, minibatches=M, batch_size=SIZE)
            return clock, (batch.reshape(N, M, SIZE), window.finished)

        return jax.lax.scan(body, MACHINES[name].start, length=60)[1]

    return run


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), name=st.sampled_from([*MACHINES][:3]))
def test_an_epoch_holds_each_example_just_once(seed: int, name: str) -> None:
    batches, finished = map(np.asarray, _dealt(name)(jax.random.key(seed)))
    orders = []
    for worker in range(N):
        used = np.concatenate(
            [batches[t, worker, : finished[t, worker]].ravel() for t in range(60)]
        )
        own = np.arange(EXAMPLES * worker, EXAMPLES * (worker + 1))
        whole = len(used) // EXAMPLES
        for epoch in np.split(used[: whole * EXAMPLES], max(whole, 1)):
            if whole:
                np.testing.assert_array_equal(np.sort(epoch), own)
        assert len(set(used[whole * EXAMPLES :])) == len(used) - whole * EXAMPLES
        orders += [tuple(used[:EXAMPLES] - own[0]), tuple(used[EXAMPLES : 2 * EXAMPLES] - own[0])]
    assert len({order for order in orders if len(order) == EXAMPLES}) > 2  # They are shuffled.


@pytest.mark.slow
def test_a_window_that_is_longer_than_an_epoch() -> None:
    dealt = window_batches(
        jax.random.key(0), jnp.arange(5)[None], jnp.array([1]), minibatches=8, batch_size=2
    ).ravel()  # Examples 2 to 17 of an order without end.
    assert sorted(dealt[3:8].tolist()) == sorted(dealt[8:13].tolist()) == [*range(5)]


AGGREGATORS = {
    "mean": jaxcomm.mean(),
    "ring_mean": jaxcomm.ring_mean(),
    "gathered": jaxcomm.all_gather_mean(jaxcomm.compression.sparsifiers.top_k(ratio=1.0)),
    "two_stage": jaxcomm.two_stage_mean(dither(levels=2**15)),
    "global_qsgd": jaxcomm.global_qsgd(levels=2**12),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "name", ["ring_mean", "global_qsgd", slow("mean"), slow("gathered"), slow("two_stage")]
)
def test_any_aggregator_forms_the_mean_of_what_is_finished(name: str) -> None:
    tx = optax.chain(AGGREGATORS[name], optax.sgd(1.0))
    step = jaxcomm.simulate(loss, tx, N, gradients=window_gradients)
    batch = window_batches(
        jax.random.key(0), SHARDS, jnp.zeros(N, jnp.int32), minibatches=M, batch_size=SIZE
    )
    finished = np.array([0, 3, 1, 2], np.int32)
    params, _, metrics = step(jnp.zeros(3), jaxcomm.init(tx, jnp.zeros(3), N), (batch, finished))
    done = np.concatenate(
        [np.asarray(batch)[M * i : M * i + m] for i, m in enumerate(finished)], dtype=np.float64
    )
    np.testing.assert_allclose(params, done.mean(axis=(0, 1)), rtol=2e-3, atol=2e-3)
    assert metrics["weight"] == 6


def train(
    tx: Any, machine: Any, count: int, workers: Any = N, *, late: bool = False, apart: bool = False
) -> Any:
    """Rows of (params, finished) and the last clock, window after window."""
    make = jaxcomm.simulate if isinstance(workers, int) else jaxcomm.make_step
    params: Any = jnp.zeros(3)
    if apart:
        params = jaxcomm.replicate(params, workers)
    step = make(loss, tx, workers, gradients=window_gradients, donate=False)
    state, clock, rows = jaxcomm.init(tx, params, workers), machine.start, []
    points = jnp.zeros((N, 3))
    for _ in range(count):
        window, after = machine.close(clock)
        batch = window_batches(
            jax.random.key(0), SHARDS, window.first, minibatches=M, batch_size=SIZE
        )
        given = (batch, window.finished, points) if late else (batch, window.finished)
        new, state, metrics = step(params, state, given)
        if late:
            both = jnp.broadcast_to(params, (N, 3)), jnp.broadcast_to(new, (N, 3))
            points = stale_params(window, after.queue, points, *both)
        params, clock = new, after
        rows.append((np.asarray(batch).reshape(N, M, SIZE, 3), window, params, metrics))
    return rows, clock


@pytest.mark.slow
def test_everybody_is_the_synchronous_baseline() -> None:
    machine = windows(shifted_exponential(mean=1.0), all_workers(), workers=N, minibatches=M)
    rows, clock = train(optax.chain(jaxcomm.mean(), optax.sgd(0.3)), machine, 4)
    x = np.zeros(3)
    for batch, window, params, _ in rows:
        x = x - 0.3 * (x - batch.astype(np.float64).mean(axis=(0, 1, 2)))
        np.testing.assert_allclose(params, x, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(window.finished, M)
    assert clock.minibatches == 4 * N * M


@pytest.mark.parametrize("workers", [N, slow("mesh")])
def test_a_late_gradient_is_taken_where_it_began(workers: Any) -> None:
    machine = windows(
        deterministic([1.0, 2.5, 1.5, 7.0]), fastest_worker(), workers=N, minibatches=M
    )
    tx = optax.chain(jaxcomm.mean(), optax.sgd(0.3))
    rows, _ = train(tx, machine, 7, N if workers == N else mesh_of(N), late=True)
    x, points = np.zeros(3), [np.zeros(3)]
    began = [0] * N  # The window in which each began its next mini-batch.
    stale = set()
    clock = machine.start
    for number, (batch, window, params, _) in enumerate(rows):
        _, clock = machine.close(clock)
        total = np.zeros(3)
        for worker, count in enumerate(np.asarray(window.finished)):
            for j in range(count):
                at = points[began[worker]] if j == 0 else x
                stale.add(number - began[worker] if j == 0 else 0)
                total += at - batch[worker, j].astype(np.float64).mean(axis=0)
            goes_on = bool(clock.queue.remaining_seconds[worker] > 0)
            if count or not window.stale[worker]:
                began[worker] = number if goes_on else number + 1
        x = x - 0.3 * total / int(window.finished.sum())
        points.append(x)
        np.testing.assert_allclose(params, x, rtol=1e-4, atol=1e-5)
    assert stale == {0, 1, 2}


def test_a_late_gradient_without_its_point_is_refused() -> None:
    machine = windows(
        deterministic([1.0, 2.5, 1.5, 7.0]), fastest_worker(), workers=N, minibatches=M
    )
    with pytest.raises(ValueError, match="need `stale_params` as the third part of the batch"):
        train(optax.chain(jaxcomm.mean(), optax.sgd(0.3)), machine, 1)


def test_gossip_variants_move_each_by_its_own_mini_batches_and_mix() -> None:
    machine = MACHINES["speeds"]
    matrix = gossip.mixing_matrix(gossip.ring(N))
    tx = optax.chain(optax.sgd(0.1), gossip.dpsgd(gossip.ring(N)))
    rows, _ = train(tx, machine, 4, apart=True)
    x = np.zeros((N, 3))
    for batch, window, params, _ in rows:
        finished = np.asarray(window.finished)
        counts = np.maximum((matrix != 0) @ finished / 3, 1e-9)  # Means of a worker and two others.
        steps = [
            sum(x[i] - batch[i, j].astype(np.float64).mean(axis=0) for j in range(count))
            / counts[i]
            for i, count in enumerate(finished)
        ]
        x = matrix @ x - 0.1 * np.array([step + np.zeros(3) for step in steps])
        np.testing.assert_allclose(params.per_worker["data"], x, rtol=1e-5, atol=1e-6)
    assert np.asarray(rows[-1][1].finished).tolist() == [3, 1, 1, 0]  # The last only mixes.


@pytest.mark.slow
def test_non_blocking_over_choco_and_matcha_is_one_expression() -> None:
    plan = gossip.matcha_plan(gossip.ring(N), 0.5)
    top = jaxcomm.compression.sparsifiers.top_k(ratio=0.5)
    tx = optax.chain(optax.sgd(0.05), gossip.choco_sgd(plan, top, step_size=0.3))
    rows, clock = train(tx, MACHINES["first abort"], 60, apart=True)
    target = SHARDS.mean(axis=(0, 1))
    distance = np.asarray(jaxcomm.consensus(rows[-1][2])) - target
    assert np.linalg.norm(distance) < 0.5 * np.linalg.norm(target)
    assert clock.idle == 0


def test_a_rate_that_follows_what_is_finished() -> None:
    seen = []

    def schedule(finished: jax.Array) -> jax.Array:
        return 1 / (1 + finished.astype(jnp.float32))

    tx = optax.chain(jaxcomm.mean(), optax.sgd(1.0), scale_by_finished(schedule))
    rows, clock = train(tx, MACHINES["speeds"], 4)
    before, x = 0, np.zeros(3)
    for batch, window, params, _ in rows:
        done = np.concatenate(
            [batch[i, :m] for i, m in enumerate(np.asarray(window.finished))], dtype=np.float64
        )
        x = x - (x - done.mean(axis=(0, 1))) / (1 + before)
        before += int(window.finished.sum())
        seen.append(before)
        np.testing.assert_allclose(params, x, rtol=1e-5, atol=1e-6)
    assert seen[-1] == clock.minibatches


def test_idle_windows_change_nothing_and_show() -> None:
    machine = windows(
        shifted_exponential(mean=5.0), deadline(0.5), workers=N, minibatches=M, in_flight="abort"
    )
    tx = optax.chain(jaxcomm.mean(), optax.sgd(0.3))
    rows, clock = train(tx, machine, 12)
    before, idle = np.zeros(3), 0
    for _, _, params, metrics in rows:
        if metrics["weight"] == 0:
            idle += 1
            np.testing.assert_array_equal(params, before)
            assert np.isnan(metrics["loss"])
        before = np.asarray(params)
    assert clock.idle == idle > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _deal((jnp.ones((2, 3)), jnp.ones((2, 4)))), "too many values"),
    ],
)
def test_mistakes(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def _deal(shards: Any, minibatches: int = 1, size: int = 1) -> Any:
    first = jnp.zeros(2, jnp.int32)
    return window_batches(
        jax.random.key(0), shards, first, minibatches=minibatches, batch_size=size
    )
