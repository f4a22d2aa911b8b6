"""Batches that grow, and the proximal point of their restarts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomm
from jaxcomm.synchronization import growing_batch, proximal_point, window_gradients
from tests.synchronization.towards import half_square as loss

N, M, ROUNDS = 2, 4, 5
DATA = np.random.default_rng(0).normal(size=(ROUNDS, N * M, 3)).astype(np.float32)


def test_batch_sizes_grow_to_the_maximum_and_restart() -> None:
    size = jax.vmap(growing_batch(1, 2.0, maximum=10, restart_period=5))
    np.testing.assert_array_equal(size(jnp.arange(11)), [1, 2, 4, 8, 10] * 2 + [1])
    # Powers are exact: 1.1**k in float32 would be off by one for some k.
    exact = [min(int(7 * 1.1**k), 2000) for k in range(80)]
    np.testing.assert_array_equal(jax.vmap(growing_batch(7, 1.1, 2000))(jnp.arange(80)), exact)


def test_growth_stages_match_a_hand_calculation() -> None:
    size = growing_batch(1, 2.0, maximum=M, restart_period=3)
    tx = optax.chain(jaxcomm.mean(), proximal_point(0.5, restart_period=3), optax.sgd(0.2))
    step = jaxcomm.simulate(loss, tx, N, gradients=window_gradients, donate=False)
    params, x = jnp.zeros(3), np.zeros(3)
    state, center = jaxcomm.init(tx, params, N), x
    for t in range(ROUNDS):
        count = [1, 2, 4][t % 3]
        finished = jnp.broadcast_to(size(jnp.int32(t)), (N,))
        params, state, metrics = step(params, state, (DATA[t], finished))
        assert metrics["weight"] == N * count
        center = x if t % 3 == 0 else center
        used = DATA[t].reshape(N, M, 3)[:, :count].astype(np.float64)
        x = x - 0.2 * ((x - used.mean(axis=(0, 1))) + 0.5 * (x - center))
        np.testing.assert_allclose(params, x, rtol=1e-5, atol=1e-6)
