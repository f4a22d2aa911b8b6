"""Under `jax.vmap`, an update that does not depend on the worker is as one that does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from tests.cases import CASES, Case
from tests.workers import aggregate

WORKERS = 3


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_an_update_that_does_not_depend_on_the_worker(case: Case) -> None:
    tx, x = case.make(), jnp.asarray(np.random.default_rng(0).normal(size=(5, 2)), jnp.float32)
    average = jax.vmap(lambda _: tx.update(x, tx.init(x))[0], axis_name="data")
    unmapped = jax.jit(average)(jnp.arange(WORKERS))
    mapped = aggregate(tx, jnp.stack([x] * WORKERS))
    np.testing.assert_allclose(unmapped, mapped, rtol=0, atol=1e-6)


def test_a_leaf_that_the_loss_does_not_use() -> None:
    loss = lambda p, x: jnp.mean((x @ p["w"] - 1) ** 2)  # noqa: E731
    params = {"w": jnp.ones(4), "unused": jnp.ones(6, jnp.bfloat16)}
    x = jax.random.normal(jax.random.key(0), (6, 4))
    for tx in (
        optax.chain(jaxcomm.mean(), optax.sgd(0.1)),
        jaxcomm.sharded_server(optax.sgd(0.1)),
    ):
        step = jaxcomm.simulate(loss, tx, 3, donate=False)
        after, _, _ = step(params, jaxcomm.init(tx, params, 3), x)
        np.testing.assert_allclose(after["w"], [0.9170, 0.7938, 0.9818, 0.7729], atol=1e-4)
        assert after["unused"].tolist() == [1] * 6
