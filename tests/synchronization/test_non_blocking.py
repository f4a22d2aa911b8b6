"""Training over windows: late gradients, rates that follow, and windows that are idle."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm.synchronization import (
    deadline,
    deterministic,
    fastest_worker,
    scale_by_finished,
    shifted_exponential,
    stale_params,
    window_batches,
    window_gradients,
    windows,
)
from tests.slow import slow
from tests.synchronization.towards import half_mean_square as loss
from tests.workers import mesh_of

N, M, SIZE, EXAMPLES = 4, 3, 2, 7
SHARDS = np.random.default_rng(0).normal(size=(N, EXAMPLES, 3)).astype(np.float32)
SGD = optax.chain(jaxcomm.mean(), optax.sgd(0.3))
SLOW = deterministic([1.0, 2.5, 1.5, 7.0])


def train(tx: Any, machine: Any, count: int, workers: Any = N, *, late: bool = False) -> Any:
    """Rows of (batch, window, params, metrics) and the last clock, window after window."""
    make: Any = jaxcomm.simulate if workers == N else jaxcomm.make_step
    step = make(loss, tx, workers, gradients=window_gradients, donate=False)
    params, points, clock, rows = jnp.zeros(3), jnp.zeros((N, 3)), machine.start, []
    state = jaxcomm.init(tx, params, workers)
    for _ in range(count):
        window, clock = machine.close(clock)
        batch = window_batches(
            jax.random.key(0), SHARDS, window.first, minibatches=M, batch_size=SIZE
        )
        given = (batch, window.finished, points) if late else (batch, window.finished)
        new, state, metrics = step(params, state, given)
        if late:
            both = jnp.broadcast_to(params, (N, 3)), jnp.broadcast_to(new, (N, 3))
            points = stale_params(window, clock.queue, points, *both)
        params = new
        rows.append((np.asarray(batch).reshape(N, M, SIZE, 3), window, params, metrics))
    return rows, clock


@pytest.mark.parametrize("workers", [N, slow(mesh_of(N))])
def test_a_late_gradient_uses_its_starting_parameters(workers: Any) -> None:
    machine = windows(SLOW, fastest_worker(), workers=N, minibatches=M)
    rows, _ = train(SGD, machine, 7, workers, late=True)
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


def test_a_late_gradient_without_its_parameters_is_refused() -> None:
    machine = windows(SLOW, fastest_worker(), workers=N, minibatches=M)
    with pytest.raises(ValueError, match="need `stale_params` as the third part of the batch"):
        train(SGD, machine, 1)


def test_the_rate_follows_the_finished_minibatches() -> None:
    def schedule(finished: jax.Array) -> jax.Array:
        return 1 / (1 + finished.astype(jnp.float32))

    tx = optax.chain(jaxcomm.mean(), optax.sgd(1.0), scale_by_finished(schedule))
    # Where times are drawn, that somebody finishes nothing is no mistake.
    speeds = deterministic([1.0, 3.0, 2.0, 9.0])._replace(period=None)
    machine = windows(speeds, fastest_worker(), workers=N, minibatches=M, in_flight="abort")
    rows, clock = train(tx, machine, 4)
    before, x = 0, np.zeros(3)
    for batch, window, params, _ in rows:
        done = np.concatenate(
            [batch[i, :m] for i, m in enumerate(np.asarray(window.finished))], dtype=np.float64
        )
        x = x - (x - done.mean(axis=(0, 1))) / (1 + before)
        before += int(window.finished.sum())
        np.testing.assert_allclose(params, x, rtol=1e-5, atol=1e-6)
    assert before == clock.minibatches


def test_idle_windows_change_nothing_and_are_counted() -> None:
    machine = windows(
        shifted_exponential(mean=5.0), deadline(0.5), workers=N, minibatches=M, in_flight="abort"
    )
    rows, clock = train(SGD, machine, 12)
    before, idle = np.zeros(3), 0
    for _, _, params, metrics in rows:
        if metrics["weight"] == 0:
            idle += 1
            np.testing.assert_array_equal(params, before)
            assert np.isnan(metrics["loss"])
        before = np.asarray(params)
    assert clock.idle == idle > 0
