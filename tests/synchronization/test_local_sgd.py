"""Local SGD and what is built like it: golden traces, limits, and what is sent when."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
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
from tests.synchronization.towards import account, prepared, run
from tests.workers import mesh_of

N, SIZE = 4, 6
TARGETS = np.random.default_rng(0).normal(size=(N, SIZE)).astype(np.float32)
SGD = optax.sgd(0.1)


def by_hand(rate: float, outer: Any, momentum: float = 0.0) -> np.ndarray:
    """Six steps towards each worker's target; `outer(anchor, mean)` after every second one."""
    x, u, anchor = np.zeros((N, SIZE)), np.zeros((N, SIZE)), np.zeros(SIZE)
    found = []
    for step in range(6):
        u = momentum * u + (x - TARGETS)
        x = x - rate * u
        if step % 2:
            anchor = outer(anchor, x.mean(axis=0))
            x = np.tile(anchor, (N, 1))
        found.append(x)
    return np.stack(found)


def test_periodically_averaged_momentum_matches_a_hand_calculation() -> None:
    x, u = np.zeros((N, SIZE)), np.zeros((N, SIZE))
    expected = []
    for step in range(6):
        u = 0.9 * u + (x - TARGETS)
        x = x - 0.1 * u
        if (step + 1) % 3 == 0:
            x, u = (np.tile(a.mean(axis=0), (N, 1)) for a in (x, u))
        expected.append(x)
    found, _ = run(pr_sgd(optax.sgd(0.1, momentum=0.9), 3), TARGETS, 6)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_slow_momentum_follows_the_equation_at_any_rate() -> None:
    slow_learning_rate, beta = 0.8, 0.6
    for rate in (0.1, 0.05):
        u = np.zeros(SIZE)

        def outer(anchor: np.ndarray, mean: np.ndarray, rate: float = rate) -> np.ndarray:
            nonlocal u
            u = beta * u + (anchor - mean) / rate
            return anchor - slow_learning_rate * rate * u

        method = slowmo(2, slow_learning_rate=slow_learning_rate, momentum=beta, learning_rate=rate)
        found, state = run(optax.chain(optax.sgd(rate), method), TARGETS, 6)
        np.testing.assert_allclose(found, by_hand(rate, outer), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state[1].outer[1].trace, u, rtol=1e-4, atol=1e-5)


def test_any_outer_optimizer_and_local_momentum() -> None:
    velocity = np.zeros(SIZE)

    def outer(anchor: np.ndarray, mean: np.ndarray) -> np.ndarray:
        nonlocal velocity
        velocity = 0.9 * velocity + (anchor - mean)
        return anchor - 0.7 * (0.9 * velocity + (anchor - mean))

    tx = diloco(optax.sgd(0.1, momentum=0.8), optax.sgd(0.7, momentum=0.9, nesterov=True), 2)
    expected = by_hand(0.1, outer, momentum=0.8)
    np.testing.assert_allclose(run(tx, TARGETS, 6)[0], expected, rtol=1e-5, atol=1e-6)


def test_post_local_sgd_averages_every_step_at_first() -> None:
    found, _ = run(optax.chain(SGD, local_sgd(post_local(start=2, period=3))), TARGETS, 8)
    equal = [bool(np.ptp(x, axis=0).max() < 1e-6) for x in found]
    assert equal == [True, True, False, False, True, False, False, True]


def test_nothing_is_sent_between_exchanges() -> None:
    sent = account(optax.chain(SGD, local_sgd(5)), TARGETS)
    assert {c.path for c in sent.collectives} == {("cond 2/2",)}
    exchange = 2 * 3 / 4 * 4 * (SIZE + 2)  # Steps that were taken, and skipped.
    assert sent.bytes_per_worker == exchange and sent.amortized_bytes_per_worker(0) == 0
    np.testing.assert_allclose(sent.amortized_bytes_per_worker(1 / 5), exchange / 5)
    assert str(sent).splitlines()[-1] == "bytes sent per worker, in rings: 0 to 48"
    with pytest.raises(ValueError, match="`share` must be from 0 to 1"):
        sent.amortized_bytes_per_worker(5)


def streaming(**options: Any) -> Any:
    tx = streaming_diloco(SGD, optax.sgd(1.0), 4, **{"fragments": 2, **options})
    return jaxcomm.init(tx, jaxcomm.replicate([jnp.zeros(2)] * 2, 2), 2)


def followed(method: Any) -> Any:
    return jaxcomm.init(optax.chain(method, SGD), jaxcomm.replicate(jnp.ones(SIZE), N), N)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: local_sgd(SGD, aggregator=2), "`period` must be .*, got a `"),
        (lambda: diloco(SGD, 0.7, 2), "`outer` must be an optax transformation"),
        (lambda: diloco(SGD, SGD, 2, aggregator=jaxcomm.mean("ici")), r"averages over \['ici'\]"),
        (lambda: streaming(fragments=3), "Each leaf needs a fragment of 3"),
        (lambda: streaming(split=lambda params: [0, 0]), "Each leaf needs a fragment of 2"),
        *(
            (lambda method=method: followed(method), r"steps must be last in `optax\.chain`")
            for method in (local_sgd(2), streaming_diloco(SGD, SGD, 2, fragments=1))
        ),
    ],
)
def test_mistakes(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


OUTER = optax.sgd(0.7, momentum=0.9)
FLUSHED: dict[str, Any] = {
    "diloco": lambda period: diloco(optax.sgd(0.1, momentum=0.9), OUTER, period),
    "local_sgd": lambda period: optax.chain(SGD, local_sgd(period)),
    "slowmo": lambda period: optax.chain(SGD, slowmo(period, momentum=0.5, learning_rate=0.1)),
    "sparseloco": lambda period: sparseloco(SGD, period, learning_rate=0.7, k=2, block_size=4),
    "pr_sgd": lambda period: pr_sgd(optax.sgd(0.1, momentum=0.9), period),
    "eager_diloco": lambda period: eager_diloco(SGD, OUTER, period, eager=False),
}


@pytest.mark.parametrize(
    ("name", "workers"),
    [("diloco", N), slow("diloco", mesh_of(N)), *(slow(name, N) for name in [*FLUSHED][1:])],
)
def test_a_flush_ends_the_last_period_like_a_shorter_one(name: str, workers: Any) -> None:
    after = []
    for period, flushes in ((3, True), (lambda step: jnp.where(step < 3, 3, 2), False)):
        step, params, state = prepared(FLUSHED[name](period), TARGETS, workers)
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
