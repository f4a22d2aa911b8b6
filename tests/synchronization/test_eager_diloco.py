"""Eager and delayed DiLoCo against NumPy, and what a step sends."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import top_k
from jaxcomm.synchronization import eager_diloco
from tests.slow import slow
from tests.workers import mesh_of

N, SIZE, COUNT, PERIOD = 4, 6, 17, 4
TARGETS = np.random.default_rng(0).normal(size=(N, SIZE)).astype(np.float32)
RATE, OUTER = 0.1, {"learning_rate": 0.7, "momentum": 0.5}


def loss(x: jax.Array, target: jax.Array) -> jax.Array:
    return 0.5 * jnp.sum((x - target[0]) ** 2)


def run(tx: Any, workers: Any = N, **extra: Any) -> tuple[np.ndarray, Any]:
    """The parameters of all workers after each step, from zero, and the last state."""
    params = jaxcomm.replicate(jnp.zeros(SIZE), workers)
    make: Any = jaxcomm.simulate if workers == N else jaxcomm.make_step
    step, state = make(loss, tx, workers, donate=False), jaxcomm.init(tx, params, workers)
    found = []
    for _ in range(COUNT):
        params, state, _ = step(params, state, TARGETS, **extra)
        found.append(np.asarray(params.per_worker["data"]))
    return np.stack(found), state


def by_hand(eager: bool) -> np.ndarray:
    """The published loop in float64: each worker has an anchor and a momentum of its own."""
    x, anchor, velocity, late = (np.zeros((N, SIZE)) for _ in range(4))
    found = []
    for t in range(1, COUNT + 1):
        x = x - RATE * (x - TARGETS)
        if t % PERIOD == 0:
            fresh = anchor - x
            given = np.tile(late.mean(axis=0), (N, 1))
            if eager:
                others = late.sum(axis=0) - late
                given = (fresh + others) / N
            velocity = OUTER["momentum"] * velocity + given
            anchor = anchor - OUTER["learning_rate"] * velocity
            x, late = anchor.copy(), fresh
        found.append(x.copy())
    return np.stack(found)


@pytest.mark.parametrize(
    ("eager", "workers"), [(True, N), (False, N), slow(True, "mesh"), slow(False, "mesh")]
)
def test_against_numpy(eager: bool, workers: Any) -> None:
    tx = eager_diloco(optax.sgd(RATE), optax.sgd(**OUTER), PERIOD, eager=eager)
    found, _ = run(tx, N if workers == N else mesh_of(N))
    np.testing.assert_allclose(found, by_hand(eager), rtol=1e-5, atol=1e-6)
    apart = np.ptp(found[PERIOD - 1 :: PERIOD], axis=1).max(axis=1)
    assert (apart > 0.01).all() if eager else (apart < 1e-6).all()


@pytest.mark.slow
def test_only_the_late_displacement_is_sent_and_feedback_keeps_the_rest() -> None:
    aggregator = jaxcomm.all_gather_mean(error_feedback(top_k(k=2)))
    for given in (None, aggregator):
        tx = eager_diloco(optax.sgd(RATE), optax.sgd(**OUTER), PERIOD, aggregator=given)
        params = jaxcomm.replicate(jnp.zeros(SIZE), N)
        step = jaxcomm.simulate(loss, tx, N, metrics="own")
        sent = jaxcomm.wire.account(step, params, jaxcomm.init(tx, params, N), TARGETS)
        assert {c.path for c in sent.collectives} == {("cond 2/2",)}
        if given is None:
            assert sent.bytes_per_worker == 2 * 3 / 4 * 4 * (SIZE + 2)
    found, state = run(tx)
    (residual,) = state[1].aggregator.own.per_worker["data"]
    assert np.isfinite(found).all() and np.abs(residual.kept).max() > 0


@pytest.mark.slow
def test_who_is_absent_goes_on_alone() -> None:
    present = jnp.arange(N) != 2
    found, _ = run(eager_diloco(optax.sgd(RATE), optax.sgd(**OUTER), PERIOD), present=present)
    alone = TARGETS[2] * (1 - (1 - RATE) ** np.arange(1, COUNT + 1))[:, None]
    np.testing.assert_allclose(found[:, 2], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eager": 1}, "`eager` must be a Python bool"),
        ({"period": 0}, "`period` must be"),
        ({"outer": 0.7}, "`outer` must be an optax transformation"),
        ({"aggregator": jaxcomm.mean("ici")}, r"averages over \['ici'\]"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    given = {"inner": optax.sgd(0.1), "outer": optax.sgd(1.0), "period": 2, **options}
    with pytest.raises(ValueError, match=message):
        eager_diloco(**given)
