"""Local SGD and what is built like it: golden traces, limits, and what is sent when."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import top_k
from jaxcomm.synchronization import (
    diloco,
    eager_diloco,
    local_sgd,
    post_local,
    pr_sgd,
    slowmo,
    sparseloco,
    streaming_diloco,
)
from tests.slow import slow
from tests.workers import mesh_of

N, SIZE = 4, 6
TARGETS = np.random.default_rng(0).normal(size=(N, SIZE)).astype(np.float32)


def loss(x: jax.Array, target: jax.Array) -> jax.Array:
    return 0.5 * jnp.sum((x - target[0]) ** 2)


def run(tx: Any, count: int, workers: Any = N, apart: bool = True) -> tuple[np.ndarray, Any]:
    """The parameters of all workers after each step, from zero, and the last state."""
    params: Any = jnp.zeros(SIZE)
    if apart:
        params = jaxcomm.replicate(params, workers)
    make = jaxcomm.simulate if workers == N else jaxcomm.make_step
    step, state, found = (
        make(loss, tx, workers, donate=False),
        jaxcomm.init(tx, params, workers),
        [],
    )
    for _ in range(count):
        params, state, _ = step(params, state, TARGETS)
        found.append(np.asarray(params.per_worker["data"] if apart else params))
    return np.stack(found), state


def by_hand(rate: float, meets: list[bool], outer: Any = lambda a, mean: mean) -> np.ndarray:
    """Gradient descent towards each worker's target; `outer(anchor, mean)` at each exchange."""
    x, anchor = np.zeros((N, SIZE)), np.zeros(SIZE)
    found = []
    for meet in meets:
        x = x - rate * (x - TARGETS)
        if meet:
            anchor = outer(anchor, x.mean(axis=0))
            x = np.tile(anchor, (N, 1))
        found.append(x)
    return np.stack(found)


@pytest.mark.parametrize(
    "method",
    [
        local_sgd(2),
        slowmo(2),
        diloco(optax.sgd(0.1), optax.sgd(0.7), 2),
        eager_diloco(optax.sgd(0.1), optax.sgd(0.7), 2),
        sparseloco(optax.sgd(0.1), 2),
        pr_sgd(optax.sgd(0.1), 2),
        streaming_diloco(optax.sgd(0.1), optax.sgd(0.7), 2, fragments=1),
    ],
)
def test_nothing_follows_local_steps(method: Any) -> None:
    with pytest.raises(ValueError, match=r"local steps must be last in `optax\.chain`"):
        jaxcomm.init(optax.chain(method, optax.sgd(0.1)), jaxcomm.replicate(jnp.ones(SIZE), N), N)


def test_five_steps_by_hand() -> None:
    # Targets 1 and 3, rate 1/2, an exchange in every second step.
    tx = optax.chain(optax.sgd(0.5), local_sgd(2))
    params = jaxcomm.replicate(jnp.zeros(1), 2)
    state, step = jaxcomm.init(tx, params, 2), jaxcomm.simulate(loss, tx, 2)
    expected = [(0.5, 1.5), (1.5, 1.5), (1.25, 2.25), (1.875, 1.875), (1.4375, 2.4375)]
    for pair in expected:
        params, state, _ = step(params, state, jnp.array([[1.0], [3.0]]))
        np.testing.assert_array_equal(params.per_worker["data"][:, 0], pair)


@pytest.mark.parametrize("period", [3, slow(1), slow(2)])
def test_against_numpy(period: int) -> None:
    found, _ = run(optax.chain(optax.sgd(0.1), local_sgd(period)), 7)
    expected = by_hand(0.1, [(t + 1) % period == 0 for t in range(7)])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_period_of_1_is_sgd_of_the_mean() -> None:
    found, _ = run(optax.chain(optax.sgd(0.1), local_sgd(1)), 5)
    together, _ = run(optax.chain(jaxcomm.mean(), optax.sgd(0.1)), 5, apart=False)
    np.testing.assert_allclose(found, np.tile(together[:, None], (1, N, 1)), rtol=1e-5, atol=1e-6)


def test_averaged_momentum_is_momentum_of_the_mean_and_parameters_alone_are_not() -> None:
    momentum = optax.sgd(0.1, momentum=0.9)
    together, _ = run(optax.chain(jaxcomm.mean(), momentum), 6, apart=False)
    both, state = run(pr_sgd(momentum, 1), 6)
    expected = np.tile(together[:, None], (1, N, 1))
    np.testing.assert_allclose(both, expected, rtol=1e-5, atol=1e-6)
    (trace,) = jax.tree.leaves(state.optimizer)
    assert np.ptp(trace, axis=0).max() < 1e-6
    # The mean of the parameters is the same without; but a worker's own momentum is not.
    _, state = run(diloco(momentum, optax.sgd(1.0), 1), 6)
    (trace,) = jax.tree.leaves(state[0])
    assert np.ptp(trace, axis=0).max() > 0.1


def test_momentum_that_is_averaged_now_and_then_by_hand() -> None:
    x, u = np.zeros((N, SIZE)), np.zeros((N, SIZE))
    expected = []
    for step in range(6):
        u = 0.9 * u + (x - TARGETS)
        x = x - 0.1 * u
        if (step + 1) % 3 == 0:
            x, u = (np.tile(a.mean(axis=0), (N, 1)) for a in (x, u))
        expected.append(x)
    found, _ = run(pr_sgd(optax.sgd(0.1, momentum=0.9), 3), 6)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "tx",
    [
        diloco(optax.sgd(0.1), optax.sgd(1.0), 2),
        optax.chain(optax.sgd(0.1), slowmo(2, momentum=0.0, learning_rate=0.1)),
    ],
    ids=["diloco", "slowmo"],
)
def test_neutral_settings_are_local_sgd(tx: Any) -> None:
    expected, _ = run(optax.chain(optax.sgd(0.1), local_sgd(2)), 6)
    np.testing.assert_allclose(run(tx, 6)[0], expected, rtol=1e-5, atol=1e-6)


def test_slow_momentum_is_of_the_equation_and_of_no_rate() -> None:
    slow_learning_rate, beta = 0.8, 0.6
    momenta = []
    for rate in (0.1, 0.05):
        u = np.zeros(SIZE)

        def outer(anchor: np.ndarray, mean: np.ndarray, rate: float = rate) -> np.ndarray:
            nonlocal u
            u = beta * u + (anchor - mean) / rate
            return anchor - slow_learning_rate * rate * u

        tx = optax.chain(
            optax.sgd(rate),
            slowmo(2, slow_learning_rate=slow_learning_rate, momentum=beta, learning_rate=rate),
        )
        found, state = run(tx, 6)
        expected = by_hand(rate, [False, True] * 3, outer)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        momenta.append(state[1].outer[1].trace)
        np.testing.assert_allclose(momenta[-1], u, rtol=1e-4, atol=1e-5)


def test_an_outer_optimizer_of_any_kind() -> None:
    velocity = np.zeros(SIZE)

    def outer(anchor: np.ndarray, mean: np.ndarray) -> np.ndarray:
        nonlocal velocity
        velocity = 0.9 * velocity + (anchor - mean)
        return anchor - 0.7 * (0.9 * velocity + (anchor - mean))

    tx = diloco(optax.sgd(0.1), optax.sgd(0.7, momentum=0.9, nesterov=True), 2)
    expected = by_hand(0.1, [False, True] * 3, outer)
    np.testing.assert_allclose(run(tx, 6)[0], expected, rtol=1e-5, atol=1e-6)


def test_post_local_sgd_meets_in_every_step_at_first() -> None:
    found, _ = run(optax.chain(optax.sgd(0.1), local_sgd(post_local(start=2, period=3))), 8)
    equal = [bool(np.ptp(x, axis=0).max() < 1e-6) for x in found]
    assert equal == [True, True, False, False, True, False, False, True]


@pytest.mark.slow
def test_compressed_with_feedback_on_a_mesh_and_simulated() -> None:
    aggregator = jaxcomm.all_gather_mean(error_feedback(top_k(k=2)))
    tx = diloco(
        optax.sgd(0.1, momentum=0.9), optax.sgd(0.7, momentum=0.5), 2, aggregator=aggregator
    )
    simulated, state = run(tx, 8)
    here, _ = run(tx, 8, mesh_of(N))
    np.testing.assert_allclose(here, simulated, rtol=1e-5, atol=1e-6)
    assert np.ptp(simulated[1], axis=0).max() < 1e-6 < np.ptp(simulated[2], axis=0).max()
    (residual,) = state[1].aggregator.own.per_worker["data"]
    assert np.abs(residual.kept).max() > 0


def test_nothing_is_sent_between_exchanges() -> None:
    tx = optax.chain(optax.sgd(0.1), local_sgd(5))
    params = jaxcomm.replicate(jnp.zeros(SIZE), N)
    step = jaxcomm.simulate(loss, tx, N)
    account = jaxcomm.wire.account(step, params, jaxcomm.init(tx, params, N), TARGETS)
    inside = [c for c in account.collectives if c.path]
    outside = [c for c in account.collectives if not c.path]
    assert {c.path for c in inside} == {("cond 2/2",)}
    exchange = 2 * 3 / 4 * 4 * (SIZE + 2)  # Steps that were taken, and left out.
    assert sum(c.bytes_per_worker for c in inside) == exchange
    assert [c.shape for c in outside] == [()]  # The loss.
    loss_bytes = 2 * 3 / 4 * 4
    assert account.bytes_per_worker == exchange + loss_bytes
    assert account.amortized_bytes_per_worker(0) == loss_bytes
    np.testing.assert_allclose(account.amortized_bytes_per_worker(1 / 5), exchange / 5 + loss_bytes)
    assert str(account).splitlines()[-1] == "bytes sent per worker: 6 to 54"
    with pytest.raises(ValueError, match="`share` must be from 0 to 1"):
        account.amortized_bytes_per_worker(5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: local_sgd(optax.sgd(0.1), aggregator=2),
            "`period` must be .*, got a `",
        ),
        (
            lambda: local_sgd(2, aggregator=0.7),
            "`aggregator` must be an optax transformation, got 0.7",
        ),
        (lambda: post_local(1, 0), "`period` must be"),
        (lambda: diloco(optax.sgd(0.1), 0.7, 2), "`outer` must be an optax transformation"),
        (lambda: diloco(0.1, optax.sgd(0.1), 2), "`inner` must be an optax transformation"),
        (lambda: pr_sgd(optax.sgd(0.1), 0), "`period` must be"),
        (lambda: pr_sgd(0.1, 2), "`inner` must be an optax transformation"),
        (lambda: local_sgd(2).init(jnp.ones(2)), "is not bound here"),
    ],
)
def test_mistakes(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_parameters_have_to_differ_by_worker() -> None:
    tx = optax.chain(optax.sgd(0.1), local_sgd(2))
    state = jaxcomm.init(tx, jnp.zeros(SIZE), N)
    with pytest.raises(ValueError, match=r"jaxcomm.replicate\(params, mesh\)"):
        jaxcomm.simulate(loss, tx, N)(jnp.zeros(SIZE), state, TARGETS)


FLUSHED: dict[str, Any] = {
    "local_sgd": lambda period: optax.chain(optax.sgd(0.1), local_sgd(period)),
    "slowmo": lambda period: optax.chain(
        optax.sgd(0.1), slowmo(period, momentum=0.5, learning_rate=0.1)
    ),
    "diloco": lambda period: diloco(
        optax.sgd(0.1, momentum=0.9), optax.sgd(0.7, momentum=0.9, nesterov=True), period
    ),
    "sparseloco": lambda period: sparseloco(
        optax.sgd(0.1), period, learning_rate=0.7, k=2, block_size=4
    ),
    "pr_sgd": lambda period: pr_sgd(optax.sgd(0.1, momentum=0.9), period),
    "eager_diloco": lambda period: eager_diloco(
        optax.sgd(0.1), optax.sgd(0.7, momentum=0.9), period, eager=False
    ),
}


@pytest.mark.parametrize("kind", ["mesh", "simulated"])
@pytest.mark.parametrize("name", FLUSHED)
def test_a_flush_ends_the_last_period_as_a_shorter_one_does(name: str, kind: str) -> None:
    workers: Any = mesh_of(N) if kind == "mesh" else N
    make: Any = jaxcomm.make_step if kind == "mesh" else jaxcomm.simulate
    after = []
    for period, flushes in ((3, True), (lambda step: jnp.where(step < 3, 3, 2), False)):
        tx = FLUSHED[name](period)
        step = make(loss, tx, workers, donate=False)
        params = jaxcomm.replicate(jnp.zeros(SIZE), workers)
        state = jaxcomm.init(tx, params, workers)
        for number in range(5):
            flush = {"flush": number == 4} if flushes else {}
            params, state, _ = step(params, state, TARGETS, **flush)
        after.append((params.per_worker["data"], state))
    leaves = [
        [x for x in jax.tree.leaves(each) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
        for each in after
    ]
    for x, y in zip(*leaves, strict=True):
        np.testing.assert_array_equal(x, y)
    # Equal up to the rounding of the update that moves a worker to the mean.
    np.testing.assert_allclose(after[0][0], np.tile(after[0][0][:1], (N, 1)), rtol=1e-6)
