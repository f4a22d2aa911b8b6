"""What counts equally in a window: mini-batches or workers; and losses with aux and a key."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import gossip
from jaxcomm.synchronization import (
    GradientSums,
    precomputed_gradients,
    scale_by_finished,
    window_gradients,
)
from jaxcomm.synchronization._window_gradients import microbatch_gradients
from tests.gossip.workers import matrices_of
from tests.slow import slow
from tests.synchronization.towards import half_square as loss

N, M, SIZE, RATE = 4, 3, 5, 0.1
RNG = np.random.default_rng(0)
DATA = RNG.normal(size=(4, N * M, SIZE)).astype(np.float32)  # Of 4 windows.
FINISHED = np.array([[0, 3, 1, 2], [1, 0, 0, 3], [3, 3, 3, 3], [0, 0, 2, 0]], np.int32)
MIXINGS = {
    "dpsgd": (gossip.dpsgd, gossip.ring(N)),
    "matcha": (gossip.matcha, gossip.matcha_plan(gossip.ring(N), budget=0.5)),
}
FORMS = ("minibatches", "workers")


def used(finished: np.ndarray) -> np.ndarray:
    """Which mini-batches are finished, [workers, mini-batches]."""
    return np.arange(M) < finished[:, None]


@pytest.mark.parametrize(
    ("name", "average_over"),
    [("dpsgd", "workers"), slow("dpsgd", "minibatches"), *(slow("matcha", f) for f in FORMS)],
)
def test_updates_are_weighted_by_share_among_neighbors(name: str, average_over: str) -> None:
    """And the mean of workers by the mean of those."""
    method, graph = MIXINGS[name]
    tx = optax.chain(optax.sgd(RATE), method(graph, order="combine_then_adapt"))
    given = functools.partial(window_gradients, average_over=average_over)
    step = jaxcomm.simulate(loss, tx, N, gradients=given)
    params = jaxcomm.replicate(jnp.zeros(SIZE), N)
    state = jaxcomm.init(tx, params, N)
    x, matrices = np.zeros((N, SIZE)), matrices_of(gossip.to_mixing(graph), len(DATA))
    for batch, finished, w in zip(DATA, FINISHED, matrices, strict=True):
        params, state, metrics = step(params, state, (batch, finished))
        counted = finished if average_over == "minibatches" else np.minimum(finished, 1)
        hears = (w != 0) | np.eye(N, dtype=bool)
        share = counted * hears.sum(axis=1) / np.maximum(hears @ counted, 1)
        off = np.where(used(finished)[..., None], x[:, None] - batch.reshape(N, M, SIZE), 0)
        moves = -RATE * (share / np.maximum(finished, 1))[:, None] * off.sum(axis=1)
        mean, x = (x + moves).mean(axis=0), w @ x + moves
        found = np.asarray(params.per_worker["data"])
        np.testing.assert_allclose(found, x, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found.mean(axis=0), mean, rtol=1e-5, atol=1e-6)
        assert metrics["weight"] == int(counted.sum())


def test_an_aggregator_forms_the_mean_over_workers() -> None:
    tx, params = optax.chain(jaxcomm.mean(), optax.sgd(1.0)), jnp.zeros(SIZE)
    given = functools.partial(window_gradients, average_over="workers")
    step = jaxcomm.simulate(loss, tx, N, gradients=given)
    params, _, _ = step(params, jaxcomm.init(tx, params, N), (DATA[0], FINISHED[0]))
    done = [DATA[0, M * i : M * i + m].mean(axis=0) for i, m in enumerate(FINISHED[0]) if m]
    np.testing.assert_allclose(params, np.mean(done, axis=0), rtol=1e-5, atol=1e-6)


def test_precomputed_sums_can_be_averaged_over_workers() -> None:
    tx = optax.chain(jaxcomm.mean(), optax.sgd(1.0))
    given = functools.partial(precomputed_gradients, average_over="workers")
    step = jaxcomm.simulate(lambda w, x: w, tx, 2, gradients=given)
    sums = GradientSums(jnp.array([1.0, 5.0]), jnp.array([1, 2]), jnp.array([0.5, 1.0]))
    params = jnp.float32(0)
    after, _, metrics = step(params, jaxcomm.init(tx, params, 2), sums, key=jax.random.key(0))
    assert (after, metrics["weight"], metrics["loss"]) == (-(1 + 2.5) / 2, 2, 0.5)


def noisy(x: jax.Array, batch: jax.Array, key: jax.Array, dtype: Any = jnp.int32) -> Any:
    noise = jax.random.normal(key)
    aux = {"noise": noise, "wrong": jnp.sum(batch > 0, dtype=dtype)}
    return jnp.sum(x * batch) * noise, aux


def test_losses_with_keys_and_aux() -> None:
    tx, params, key = (
        optax.chain(jaxcomm.mean(), optax.sgd(1.0)),
        jnp.zeros(SIZE),
        jax.random.key(7),
    )
    gradients = functools.partial(window_gradients, has_aux=True)
    given = functools.partial(noisy, dtype=jnp.float32)
    step = jaxcomm.simulate(given, tx, N, has_aux=True, gradients=gradients)
    batch = DATA[0], FINISHED[0]
    after, _, metrics = step(params, jaxcomm.init(tx, params, N), batch, key=key)

    def drawn(worker: int, number: int) -> jax.Array:
        return jax.random.normal(jax.random.fold_in(jax.random.fold_in(key, worker), number))

    noise = np.array([drawn(i, j) for i, j in np.argwhere(used(FINISHED[0]))])
    done = DATA[0].reshape(N, M, SIZE)[used(FINISHED[0])]
    assert len({*noise.tolist()}) == len(noise)  # Every mini-batch has its own.
    np.testing.assert_allclose(after, -np.mean(noise[:, None] * done, 0), rtol=1e-5)
    np.testing.assert_allclose(metrics["noise"], np.mean(noise), rtol=1e-5)
    np.testing.assert_allclose(metrics["wrong"], np.mean(np.sum(done > 0, axis=1)), rtol=1e-6)


def test_sums_of_aux_are_zero_without_finished_minibatches() -> None:
    def window(finished: jax.Array) -> GradientSums:
        batches, key = jnp.asarray(DATA[0, :M]), jax.random.key(0)
        return microbatch_gradients(noisy, jnp.ones(SIZE), batches, finished, key=key, has_aux=True)

    found = jax.vmap(window, axis_name="data")(jnp.array([0, 2]))
    assert found.aux["wrong"].dtype == jnp.float32
    np.testing.assert_array_equal(found.aux["wrong"], [0, np.sum(DATA[0, :2] > 0)])
    np.testing.assert_array_equal([found.aux["noise"][0], found.loss[0]], [0, 0])


def test_a_rate_by_mini_batches_and_a_mean_over_workers_do_not_mix() -> None:
    tx = optax.chain(jaxcomm.mean(), optax.sgd(1.0), scale_by_finished(lambda count: 1.0))
    given = functools.partial(window_gradients, average_over="workers")
    step = jaxcomm.simulate(loss, tx, N, gradients=given)
    with pytest.raises(ValueError, match="counts workers"):
        step(jnp.zeros(SIZE), jaxcomm.init(tx, jnp.zeros(SIZE), N), (DATA[0], FINISHED[0]))
