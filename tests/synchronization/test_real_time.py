"""Windows by the clock on the wall, one worker a process, and by a simulated one."""

import itertools
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import gossip
from jaxcomm.synchronization import (
    RealTimeWindow,
    _real_time,
    deterministic,
    precomputed_gradients,
    window_gradients,
)
from tests.synchronization.towards import half_mean_square as loss
from tests.workers import mesh_of

N, M = 4, 3
DATA = np.random.default_rng(0).normal(size=(N, 40, 2, 3)).astype(np.float32)


def make(tx: Any, workers: int, **options: Any) -> Any:
    mesh = mesh_of(workers)
    step = jaxcomm.make_step(loss, tx, mesh, gradients=precomputed_gradients)
    return RealTimeWindow(loss, step, mesh, **{"minibatches": M, **options})


@pytest.mark.slow
@pytest.mark.parametrize("gossips", [False, True])
def test_on_fake_devices_windows_match_the_simulated_clock(gossips: bool) -> None:
    tx = optax.chain(jaxcomm.mean(), optax.sgd(0.3))
    params: Any = jnp.zeros(3)
    if gossips:
        tx = optax.chain(optax.sgd(0.1), gossip.dpsgd(gossip.ring(N)))
        params = jaxcomm.replicate(params, mesh_of(N))
    times = deterministic([1.0, 2.0, 1.5, 3.0])
    window = make(tx, N, seconds=3.0, straggler=times)
    queues = [iter(DATA[i]) for i in range(N)]
    state, counts = jaxcomm.init(tx, params, mesh_of(N)), []
    for _ in range(3):
        params, state, metrics, finished = window(params, state, queues)
        counts.append(finished.tolist())
        assert (metrics["seconds"], metrics["idle"]) == (3, 0)
        np.testing.assert_array_equal(metrics["starved"], 0)
    assert counts == [[3, 1, 2, 1]] * 3
    # The same windows in the simulator, whose batches are cut from the same queues.
    simulated: Any = jaxcomm.replicate(jnp.zeros(3), N) if gossips else jnp.zeros(3)
    step = jaxcomm.simulate(loss, tx, N, gradients=window_gradients)
    state = jaxcomm.init(tx, simulated, N)
    for t in range(3):
        batch = np.concatenate([DATA[i, t * c : t * c + M] for i, c in enumerate(counts[0])])
        simulated, state, _ = step(simulated, state, (batch, np.array(counts[0], np.int32)))
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(simulated), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


class Wall:
    """A clock that only mini-batches move on, so that the tests do not depend on this machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        fake = types.SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(_real_time, "time", fake)

    def queue(self, *seconds: float) -> Iterator[np.ndarray]:
        """Mini-batches that take so long, the last of these times for all that follow."""
        for number in itertools.count():
            self.now += seconds[min(number, len(seconds) - 1)]
            yield DATA[0, number % 40]


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    return Wall(monkeypatch)


ONE = optax.chain(jaxcomm.mean(), optax.sgd(0.3))


def run(window: Any, queue: Iterator[np.ndarray], count: int) -> tuple[list[int], Any]:
    params = jnp.zeros(3)
    state, counts = jaxcomm.init(ONE, params, mesh_of(1)), []
    for _ in range(count):
        params, state, metrics, finished = window(params, state, [queue])
        counts.append(int(finished[0]))
        assert int(metrics["weight"]) == finished[0]
    return counts, metrics


def test_a_worker_finishes_only_what_fits_before_the_deadline(wall: Wall) -> None:
    counts, metrics = run(make(ONE, 1, seconds=0.85, minibatches=4), wall.queue(0.3), 4)
    # The first of all is not timed, but compiled.
    assert counts == [3, 2, 2, 2]
    assert metrics["seconds"] == pytest.approx(0.6) and metrics["exchange_seconds"] == 0
    counts, metrics = run(make(ONE, 1, seconds=float("inf")), wall.queue(0.3), 2)
    assert counts == [M, M] and metrics["seconds"] == pytest.approx(0.9)


def test_lasting_delays_are_predicted(wall: Wall) -> None:
    times = [0.0, 0.1, 0.1, 0.1, 0.1, 0.7, 0.1, 0.1, 0.1]
    window = make(ONE, 1, seconds=0.45, minibatches=4)
    assert run(window, wall.queue(*times), 3)[0] == [4, 2, 4]
    slower = run(make(ONE, 1, seconds=0.45, minibatches=4), wall.queue(0.0, 0.1, 0.1, 0.3), 8)[0]
    assert slower[-1] == 1


def test_a_minibatch_that_does_not_fit_is_tried_periodically(wall: Wall) -> None:
    window = make(ONE, 1, seconds=0.1)
    counts, metrics = run(window, wall.queue(0.05, 0.12), 16)
    assert set(counts[3:]) == {0, 1}
    assert metrics["idle"] == metrics["starved"] == counts.count(0) > 0
    np.testing.assert_array_equal(window.minibatch_seconds, 0.12)


def test_no_taken_minibatch_is_lost(wall: Wall) -> None:
    window, queue, x = make(ONE, 1, seconds=0.25), wall.queue(0.1), np.zeros(3)
    params, taken = jnp.zeros(3), 0
    state = jaxcomm.init(ONE, params, mesh_of(1))
    for _ in range(4):
        params, state, _, (count,) = window(params, state, [queue])
        used = DATA[0, taken : taken + count].astype(np.float64)
        x, taken = x - 0.3 * (x - used.mean(axis=(0, 1))), taken + count
        np.testing.assert_allclose(params, x, rtol=1e-5, atol=1e-6)
    wall.now += 100  # An evaluation.
    closed = window(params, state, [queue])
    assert closed.finished == 0
    wall.now += 100
    window.restart()
    assert window(closed.params, closed.opt_state, [queue]).finished == 2


def test_an_impossible_deadline_is_an_error_before_training() -> None:
    with pytest.raises(ValueError, match="No mini-batch ends within"):
        run(make(ONE, 1, seconds=1e-7), iter(DATA[0]), 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seconds": 1.0}, "Start one process per device"),
        ({"seconds": 0.5, "straggler": deterministic([1.0] * N)}, "a deadline of 0.5 s"),
        ({"seconds": 1.0, "straggler": deterministic([1.0, 1.0, 2.0, 1.0])}, "starves the workers"),
    ],
)
def test_mistakes(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(ONE, N, **options)
