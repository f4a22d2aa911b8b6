"""A state of one setting in a transformation of another: an error, or the run goes on rightly."""

from typing import Any

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import gossip
from jaxcomm.aggregation import delayed
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import block_coordinate, top_k
from jaxcomm.synchronization import (
    diloco,
    eager_diloco,
    local_sgd,
    pr_sgd,
    slowmo,
    sparseloco,
    streaming_diloco,
)
from jaxcomm.training import loss_scaled, loss_scaled_gradients
from tests.gossip.workers import initial as own_initial
from tests.gossip.workers import trajectory
from tests.slow import slow
from tests.workers import aggregator, initial

N, SIZE, STEPS = 4, 12, 14
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, SIZE)).astype(np.float32)
UPDATES = RNG.normal(size=(STEPS, N, SIZE)).astype(np.float32)


def results_of(txs: list[Any], settings: list[int]) -> np.ndarray:
    """The results of aggregators in turn, one per step, on one state: [steps, coordinates]."""
    updates = [jnp.asarray(each) for each in UPDATES[: len(settings)]]
    state, found = initial(txs[settings[0]], updates[0], "vmap"), []
    for given, setting in zip(updates, settings, strict=True):
        run = aggregator(txs[setting], N, "vmap")
        result, state = run(given, state, np.ones(N, np.float32))
        found.append(np.asarray(result[0]))
    return np.stack(found)


def parameters_of(before: Any, after: Any, change: int) -> np.ndarray:
    """All workers' parameters [steps, n, d], of which the first `change` are by `before`."""
    first, state = trajectory(before, X, UPDATES[:change])
    second, _ = trajectory(after, first[-1].astype(np.float32), UPDATES[change:], first=state)
    return np.concatenate([first, second])


def _outer() -> Any:
    return optax.sgd(0.7, momentum=0.5)


# What takes a schedule as its period: the run is that of a schedule that changes.
PERIODIC = {
    "local_sgd": local_sgd,
    "slowmo": lambda period: slowmo(period, learning_rate=0.1),
    "diloco": lambda period: diloco(optax.sgd(0.1), _outer(), period),
    "pr_sgd": lambda period: pr_sgd(optax.sgd(0.1, momentum=0.5), period),
    "sparseloco": lambda period: sparseloco(optax.sgd(0.1), period, k=2, block_size=4),
    "eager_diloco": lambda period: eager_diloco(optax.sgd(0.1), _outer(), period),
}


@pytest.mark.parametrize(
    "name", ["local_sgd", "diloco", *map(slow, [*PERIODIC][1:2] + [*PERIODIC][3:])]
)
@pytest.mark.parametrize("before,after", [(6, 2), (2, 6)])
def test_another_period(name: str, before: int, after: int) -> None:
    make, change = PERIODIC[name], 5
    found = parameters_of(make(before), make(after), change)
    schedule = lambda step: jnp.where(step < change, before, after)  # noqa: E731
    expected, _ = trajectory(make(schedule), X, UPDATES)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def _streamed(settings: list[tuple[int, int]]) -> np.ndarray:
    """Streaming DiLoCo of one fragment, `(period, overlap)` in each step, in NumPy.

    A result is applied once, as soon as it is as late as the setting says.
    """
    x, anchor, under_way = X.astype(np.float64), X[0].astype(np.float64), False
    found = []
    for t, ((period, overlap), update) in enumerate(zip(settings, UPDATES, strict=True), 1):
        x = x - 0.1 * update
        if t % period == 0 and not under_way:
            anchor, under_way = x.mean(axis=0), True
        if under_way and t % period >= overlap:
            x, under_way = np.broadcast_to(anchor, x.shape), False
        found.append(x)
    return np.stack(found)


def _streaming(period: int, overlap: int) -> Any:
    return streaming_diloco(optax.sgd(0.1), optax.sgd(1.0), period, fragments=1, overlap=overlap)


@pytest.mark.parametrize(
    "before,after,change",
    [
        ((6, 3), (6, 1), 7),  # One is under way, for longer than it would be.
        slow((6, 1), (6, 3), 7),  # One has arrived, and would not have.
        slow((5, 4), (6, 1), 5),  # The next is due while one is under way.
        slow((5, 2), (6, 1), 6),  # The later period has none where one would arrive.
        slow((3, 0), (7, 6), 4),
    ],
)
def test_streaming(before: tuple[int, int], after: tuple[int, int], change: int) -> None:
    found = parameters_of(_streaming(*before), _streaming(*after), change)
    expected = _streamed([before] * change + [after] * (STEPS - change))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("before,after", [(6, 2), slow(2, 6), slow(4, 3)])
def test_gossip_of_another_period(before: int, after: int) -> None:
    """Steps are counted from the start."""
    make = lambda period: gossip.periodic_averaging(period, gossip.dpsgd(gossip.ring(N)))  # noqa: E731
    found = parameters_of(make(before), make(after), 5)
    spread = np.abs(found - found.mean(axis=1, keepdims=True)).max(axis=(1, 2))
    due = [t % (before if t <= 5 else after) == 0 for t in range(1, STEPS + 1)]
    np.testing.assert_array_equal(spread < 1e-5, due)
    # Only steps of an exchange pull worker 0 off its own way.
    lonely = lambda period: gossip.noloco(nx.complete_graph(N), period)  # noqa: E731
    found = parameters_of(lonely(before), lonely(after), 5)
    moved = np.diff(found, axis=0, prepend=X[None]) - UPDATES
    np.testing.assert_array_equal(np.abs(moved).max(axis=(1, 2)) > 1e-3, due)


@pytest.mark.parametrize("before,after,windows", [(8, 4, (6, 4, 4)), (4, 8, (4, 8))])
def test_accumulate(before: int, after: int, windows: tuple[int, ...]) -> None:
    """The first window has the gradients of both; its mean is that of all of them."""
    txs = [
        jaxcomm.accumulate(optax.chain(jaxcomm.mean(), optax.sgd(1.0)), k) for k in (before, after)
    ]
    found = results_of(txs, [0] * 5 + [1] * (sum(windows) - 5))
    ends = np.cumsum(windows)
    for t, result in enumerate(found, 1):
        last = np.flatnonzero(ends == t)
        expected = np.zeros(SIZE)
        if last.size:
            expected = -UPDATES[t - windows[last[0]] : t].mean(axis=(0, 1))
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def _stages(ks: tuple[int, ...], every: int) -> Any:
    stages = [jaxcomm.all_gather_mean(error_feedback(top_k(k=k))) for k in ks]
    return jaxcomm.warmup(stages, every=every)


@pytest.mark.slow
@pytest.mark.parametrize(
    "before,after,sent",
    [
        (((8, 4, 2), 4), ((8, 4, 2), 1), [8, 8, 8, 8, 4, 2, 2]),
        (((8, 4, 2), 1), ((8, 4, 2), 6), [8, 4, 2, 2, 2, 8, 4]),
        (((8, 4, 2), 1), ((8, 4), 1), [8, 4, 2, 2, 2, 4, 4]),
    ],
)
def test_warmup(before: Any, after: Any, sent: list[int]) -> None:
    """The number of steps so far decides; a warm-up of fewer stages has its last one."""
    found = results_of([_stages(*before), _stages(*after)], [0] * 5 + [1] * 2)
    alone = [jaxcomm.all_gather_mean(error_feedback(top_k(k=k))) for k in (8, 4, 2)]
    expected = results_of(alone, [(8, 4, 2).index(k) for k in sent])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_fewer_ratios() -> None:
    """The largest of the fewer ones, from which it adapts."""
    make = lambda ratios: jaxcomm.adaptive_ratio(  # noqa: E731
        lambda ratio: top_k(ratio=ratio), ratios, target_error=1e-6, patience=50
    )
    found = results_of([make((0.25, 0.5, 1.0)), make((0.25, 0.5))], [0] * 2 + [1] * 2)
    expected = results_of([jaxcomm.all_gather_mean(top_k(ratio=0.5))], [0] * 4)
    np.testing.assert_allclose(found[2:], expected[2:], rtol=1e-6)


def test_fewer_blocks() -> None:
    """Every block is in its turn within as many steps."""
    txs = [jaxcomm.all_reduce_mean(block_coordinate(blocks)) for blocks in (8, 3)]
    found = results_of(txs, [0] * 5 + [1] * 4)
    means = UPDATES[:9].mean(axis=1)
    for t, turn in zip(range(5, 9), (2, 0, 1, 2), strict=True):
        expected = np.zeros(SIZE)
        expected[4 * turn : 4 * turn + 4] = means[t, 4 * turn : 4 * turn + 4]
        np.testing.assert_allclose(found[t], expected, rtol=1e-5, atol=1e-6)


def test_a_shorter_interval_of_the_loss_scale() -> None:
    loss = lambda w, state, x: (jnp.mean(w * x), state)  # noqa: E731
    state, scales = loss_scaled(scale=4.0), []
    for interval in (8, 8, 8, 2, 2, 2):

        def one(x: Any, state: Any = state, interval: int = interval) -> Any:
            (_, after), _ = loss_scaled_gradients(
                loss, jnp.float32(1), x, model_state=state, growth_interval=interval
            )
            return after

        state = jax.tree.map(lambda x: x[0], jax.vmap(one, axis_name="data")(jnp.ones((2, 1))))
        scales.append(float(state.scale))
    assert scales == [4, 4, 4, 8, 8, 16]


RINGS = {
    "delayed": lambda n: delayed(jaxcomm.mean(), n),
    "lazy": lambda n: jaxcomm.lazy(memory=n),
    "block_coordinate": lambda n: jaxcomm.all_reduce_mean(block_coordinate(n, "gauss_southwell")),
}
OWN_RINGS = {
    "sgp": lambda n: gossip.sgp(gossip.ring(N), overlap=n),
    "ad_psgd": lambda n: gossip.ad_psgd(gossip.ring(N), staleness=n),
}


@pytest.mark.parametrize("before,after", [(3, 2), (2, 3)])
@pytest.mark.parametrize("name", RINGS)
def test_a_ring_of_another_length_is_an_error(name: str, before: int, after: int) -> None:
    make, updates = RINGS[name], jnp.asarray(UPDATES[0])
    state = initial(make(before), updates, "vmap")
    with pytest.raises(ValueError, match=r"`jaxcomm\.init`"):
        jax.eval_shape(aggregator(make(after), N, "vmap"), updates, state, jnp.ones(N))


@pytest.mark.parametrize("before,after", [(2, 1), (1, 2), (2, 0)])
@pytest.mark.parametrize("name", OWN_RINGS)
def test_pending_messages_of_another_length_are_an_error(
    name: str, before: int, after: int
) -> None:
    make = OWN_RINGS[name]
    with pytest.raises(ValueError, match=r"`overlap` or `staleness`.*`jaxcomm\.init`"):
        trajectory(make(after), X, UPDATES, first=own_initial(make(before), X))
