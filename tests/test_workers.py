"""Parameters and state that differ by worker: made, trained, averaged, saved."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest

import jaxcomm
from jaxcomm import gossip
from tests.slow import slow
from tests.workers import mesh_of

WORKERS = 4
TX = optax.chain(
    jaxcomm.per_worker(optax.sgd(0.1, momentum=0.9)),
    gossip.dpsgd(gossip.ring(WORKERS), diagnostics=True),
)


def loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    return jnp.mean((batch @ params["kernel"] + params["bias"][None]) ** 2)


def begin(workers: Any) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    params = {"kernel": rng.normal(size=(3, 2)), "bias": rng.normal(size=2)}
    params = jaxcomm.replicate(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params), workers)
    return params, jaxcomm.init(TX, params, workers)


BATCH = np.random.default_rng(1).normal(size=(16, 3)).astype(np.float32)


@pytest.mark.slow
def test_a_mesh_and_the_simulator_train_alike() -> None:
    outcomes = []
    for workers, make in ((mesh_of(WORKERS), jaxcomm.make_step), (WORKERS, jaxcomm.simulate)):
        train, step = begin(workers), make(loss, TX, workers)
        losses = []
        for _ in range(5):
            *train, metrics = step(*train, BATCH)
            losses.append(metrics["loss"])
        assert losses[-1] < losses[0] and metrics["diagnostics/disagreement"] > 0
        outcomes.append(jax.device_get(train))
    for left, right in zip(*map(jax.tree.leaves, outcomes), strict=True):
        if not jnp.issubdtype(left.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)
    params, _ = outcomes[0]
    mean = jaxcomm.consensus(params)
    kernels = params.per_worker["data"]["kernel"]
    np.testing.assert_allclose(mean["kernel"], kernels.mean(axis=0), rtol=1e-6)
    apart = sum(
        np.sum((x - x.mean(axis=0)) ** 2) for x in jax.tree.leaves(params.per_worker["data"])
    )
    np.testing.assert_allclose(jaxcomm.consensus_distance(params), apart, rtol=1e-5)


@pytest.mark.slow
def test_each_worker_has_its_own_gradient_and_optimizer() -> None:
    """One step by hand: gradients at each worker's part of the batch."""
    params, state = begin(WORKERS)
    before = jax.device_get(params.per_worker["data"])
    step = jaxcomm.simulate(loss, TX, WORKERS, donate=False)
    after, state, metrics = step(params, state, BATCH)
    w = gossip.mixing_matrix(gossip.ring(WORKERS))
    losses = []
    for worker, part in enumerate(np.split(BATCH, WORKERS)):
        own = {name: jnp.asarray(x[worker]) for name, x in before.items()}
        value, gradient = jax.value_and_grad(loss)(own, part)
        losses.append(value)
        for name, x in before.items():
            mixed = np.tensordot(w[worker], x, 1)
            found = after.per_worker["data"][name][worker]
            np.testing.assert_allclose(found, mixed - 0.1 * gradient[name], rtol=1e-5, atol=1e-6)
            trace = state[0].per_worker["data"][0].trace[name][worker]
            np.testing.assert_allclose(trace, gradient[name], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(metrics["loss"], np.mean(losses), rtol=1e-6)


@pytest.mark.parametrize("workers", [1, 3, slow(7)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_all_agree_on_is_the_consensus_bit_for_bit(workers: int, dtype: Any) -> None:
    params = {"a": jnp.asarray(np.random.default_rng(0).normal(size=(5, 2)), dtype), "b": 3.7}
    mean = jaxcomm.consensus(jaxcomm.replicate(params, workers))
    np.testing.assert_array_equal(mean["a"].astype(jnp.float32), params["a"].astype(jnp.float32))
    assert mean["a"].dtype == dtype and mean["b"] == jnp.float32(3.7)


def test_float64_parameters_are_compared_in_float64() -> None:
    with jax.enable_x64(True):
        params = jaxcomm.PerWorker({"data": 1 + jnp.array([0.0, 2e-9], jnp.float64)})
        np.testing.assert_allclose(jaxcomm.consensus_distance(params), 2e-18, rtol=1e-6)


def test_a_checkpoint_holds_every_worker(tmp_path: pathlib.Path) -> None:
    mesh = mesh_of(WORKERS)
    step = jaxcomm.make_step(loss, TX, mesh, donate=False)
    train = step(*begin(mesh), BATCH)[:2]

    def words(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
            tree,
        )

    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", words(train))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "checkpoint", words(train))
    jax.tree.map(np.testing.assert_array_equal, words(train), restored)
    assert restored[0].per_worker["data"]["kernel"].shape == (WORKERS, 3, 2)


def test_axes_have_to_be_those_of_the_step() -> None:
    params = jaxcomm.replicate(jnp.ones(3), {"data": 2, "model": 2}, axis_name=("data", "model"))
    assert params.per_worker["data,model"].shape == (4, 3)
    tx = optax.sgd(0.1)
    step = jaxcomm.simulate(lambda x, b: jnp.sum(x) * jnp.mean(b), tx, {"data": 2, "model": 2})
    with pytest.raises(
        ValueError,
        match=r"differs over the axes \['data', 'model'\], with which `axis_name`='data'",
    ):
        step(params, tx.init(jnp.ones(3)), jnp.ones(4))
    with pytest.raises(ValueError, match="lacks"):
        jaxcomm.replicate(jnp.ones(3), mesh_of(2), axis_name="model")
