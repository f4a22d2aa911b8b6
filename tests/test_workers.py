"""Parameters and state that differ by worker: made, trained, averaged."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import gossip
from tests.slow import slow
from tests.training.places import at, begun, normal

N = 4
BATCH = normal(0, 16, 3)


def loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    return jnp.mean((batch @ params["kernel"] + params["bias"][None]) ** 2)


@pytest.mark.parametrize("where", ["simulated 4", *map(slow, ["auto 4", "explicit 4"])])
def test_each_worker_has_its_own_gradient_and_optimizer(where: str) -> None:
    """Two steps by hand: gradients at each worker's part of the batch, then the mean."""
    ring = gossip.ring(N)
    inner = jaxcomm.per_worker(optax.sgd(0.1, momentum=0.9))
    tx = optax.chain(inner, gossip.dpsgd(ring, diagnostics=True))
    start = {"kernel": jnp.asarray(normal(1, 3, 2)), "bias": jnp.asarray(normal(2, 2))}
    params = jaxcomm.replicate(start, at(where))
    step, state = begun(loss, tx, at(where), params)
    momentum = jax.tree.map(np.zeros_like, params.per_worker["data"])
    for _ in range(2):
        before = jax.device_get(params.per_worker["data"])
        params, state, metrics = step(params, state, BATCH)
        rows = BATCH.reshape(N, -1, 3)
        values, gradient = jax.vmap(jax.value_and_grad(loss))(before, rows)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
        after = params.per_worker["data"]
        for name, x in before.items():
            mixed = np.tensordot(gossip.mixing_matrix(ring), x, 1)
            expected = mixed - 0.1 * momentum[name]
            np.testing.assert_allclose(after[name], expected, rtol=1e-5, atol=1e-6)
            trace = state[0].per_worker["data"][0].trace[name]
            np.testing.assert_allclose(trace, momentum[name], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(metrics["loss"], np.mean(values), rtol=1e-6)
    assert metrics["diagnostics/disagreement"] > 0
    own = jax.tree.map(np.asarray, after)
    for run in (lambda f: f(params), lambda f: jax.jit(f)(params)):
        mean = run(jaxcomm.consensus)
        np.testing.assert_allclose(mean["kernel"], own["kernel"].mean(axis=0), rtol=1e-5)
        distance = sum(np.sum((x - x.mean(axis=0)) ** 2) for x in own.values())
        np.testing.assert_allclose(run(jaxcomm.consensus_distance), distance, rtol=1e-5)


@pytest.mark.parametrize("workers", [1, 3, slow(7)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_equal_parameters_are_their_consensus_bit_for_bit(workers: int, dtype: Any) -> None:
    params = {"a": jnp.asarray(normal(0, 5, 2), dtype), "b": 3.7}
    mean = jaxcomm.consensus(jaxcomm.replicate(params, workers))
    np.testing.assert_array_equal(mean["a"].astype(jnp.float32), params["a"].astype(jnp.float32))
    assert mean["a"].dtype == dtype and mean["b"] == jnp.float32(3.7)


def test_float64_parameters_are_compared_in_float64() -> None:
    with jax.enable_x64(True):
        params = jaxcomm.PerWorker({"data": 1 + jnp.array([0.0, 2e-9], jnp.float64)})
        np.testing.assert_allclose(jaxcomm.consensus_distance(params), 2e-18, rtol=1e-6)


def test_axes_must_match_the_step() -> None:
    sizes = {"data": 2, "model": 2}
    params = jaxcomm.replicate(jnp.ones(3), sizes, axis_name=("data", "model"))
    assert params.per_worker["data,model"].shape == (4, 3)
    step = jaxcomm.simulate(lambda x, b: jnp.sum(x) * jnp.mean(b), optax.sgd(0.1), sizes)
    message = r"differs over the axes \['data', 'model'\], with which `axis_name`='data'"
    with pytest.raises(ValueError, match=message):
        step(params, (), jnp.ones(4))
