"""SparseLoCo against NumPy, and the bytes of its settings."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm.synchronization import sparseloco

N, SIZE, COUNT, PERIOD, BLOCK, K, DECAY = 3, 10, 15, 3, 4, 2, 0.9
TARGETS = np.random.default_rng(0).normal(size=(N, SIZE)).astype(np.float32)
RATE, OUTER = 0.1, 0.8


def coarse(x: np.ndarray) -> np.ndarray:
    """Of each block the two largest coordinates, as one of two magnitudes."""
    found = np.zeros_like(x)
    for start in range(0, len(x), BLOCK):
        block = x[start : start + BLOCK]
        chosen = np.argsort(-np.abs(block), kind="stable")[:K]
        sizes = np.abs(block[chosen])
        is_large = sizes > sizes.mean()
        means = {flag: sizes[is_large == flag].mean() for flag in {*is_large.tolist()}}
        sent = [means[flag] for flag in is_large.tolist()]
        found[start + chosen] = np.sign(block[chosen]) * sent
    return found


def by_hand() -> np.ndarray:
    """The published loop in float64."""
    x, anchor, residual = np.zeros((N, SIZE)), np.zeros(SIZE), np.zeros((N, SIZE))
    found = []
    for t in range(1, COUNT + 1):
        x = x - RATE * (x - TARGETS)
        if t % PERIOD == 0:
            residual = DECAY * residual + (anchor - x)
            sent = np.stack([coarse(each) for each in residual])
            residual = residual - sent
            anchor = anchor - OUTER * sent.mean(axis=0)
            x = np.tile(anchor, (N, 1))
        found.append(x.copy())
    return np.stack(found)


def loss(x: jax.Array, target: jax.Array) -> jax.Array:
    return 0.5 * jnp.sum((x - target[0]) ** 2)


def test_against_numpy() -> None:
    tx = sparseloco(
        optax.sgd(RATE), PERIOD, k=K, block_size=BLOCK, decay=DECAY, learning_rate=OUTER
    )
    params = jaxcomm.replicate(jnp.zeros(SIZE), N)
    step, state = jaxcomm.simulate(loss, tx, N), jaxcomm.init(tx, params, N)
    for expected in by_hand():
        params, state, _ = step(params, state, TARGETS)
        np.testing.assert_allclose(params.per_worker["data"], expected, rtol=1e-4, atol=1e-5)


def test_the_settings_of_the_paper_send_a_fifth_of_a_bit() -> None:
    """2 bits and an index of 8 for 64 of 4096 coordinates, and two float32: 0.19 bits each."""
    tx, size = sparseloco(optax.sgd(RATE)), 2**18
    params = jax.eval_shape(lambda: jaxcomm.replicate(jnp.zeros(size), 2))
    state = jax.eval_shape(lambda: jaxcomm.init(tx, jaxcomm.replicate(jnp.zeros(size), 2), 2))
    step = jaxcomm.simulate(loss, tx, 2, metrics="own")
    sent = jaxcomm.wire.account(step, params, state, jax.ShapeDtypeStruct((2, size), jnp.float32))
    assert 0.17 < 8 * sent.bytes_per_worker / size < 0.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "`k` must be a Python int of at least 1"),
        ({"block_size": 0}, "`block_size` must be a Python int of at least 1"),
        ({"period": 0}, "`period` must be"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sparseloco(optax.sgd(0.1), **options)
