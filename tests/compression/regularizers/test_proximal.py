"""Proximal operators against their definition, and proximal steps against closed forms."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm.compression.regularizers import Regularizer, block_lasso, group_lasso, l1
from jaxcomm.compression.regularizers._proximal import block_soft_threshold, group_soft_threshold
from jaxcomm.compression.sparsifiers import nonzero
from tests.slow import slow

SHAPE = (5, 4)
DRAWN = np.random.default_rng(0).standard_t(2, size=(40, *SHAPE)).astype(np.float32)
# With a strength of 2, and the groups of a flat vector.
REGULARIZERS = pytest.mark.parametrize(
    ("regularizer", "groups"),
    [
        (l1(2.0), [[j] for j in range(20)]),
        (group_lasso(2.0), [[*range(4 * row, 4 * row + 4)] for row in range(5)]),
        (block_lasso(2.0, 3), [[*range(i, min(i + 3, 20))] for i in range(0, 20, 3)]),
    ],
    ids=["l1", "group", "block"],
)


@REGULARIZERS
def test_moreaus_identity(regularizer: Regularizer, groups: list[list[int]]) -> None:
    """x = prox_f(x) + prox_f*(x), where the conjugate's is the projection on balls."""
    found = jax.jit(jax.vmap(lambda x: regularizer.operator(x, 0.4)))(DRAWN)
    found = np.asarray(found, np.float64).reshape(40, -1)
    for x, result in zip(DRAWN.reshape(40, -1).astype(np.float64), found, strict=True):
        for group in groups:
            part, most = x[group], 0.8 * len(group) ** 0.5
            projected = part * min(1, most / np.linalg.norm(part))
            np.testing.assert_allclose(result[group] + projected, part, rtol=0, atol=1e-5)
    assert 0.1 < np.mean(found == 0) < 0.9
    special = np.asarray(regularizer.operator(jnp.zeros(SHAPE).at[1, 2].set(jnp.nan), 0.4))
    assert np.isnan(special[1, 2])
    assert not np.isnan(special[4]).any() and not np.signbit(special[4]).any()
    norms = [np.linalg.norm(DRAWN[0].ravel()[group]) * len(group) ** 0.5 for group in groups]
    np.testing.assert_allclose(regularizer.value(jnp.asarray(DRAWN[0])), 2 * sum(norms), rtol=1e-5)


@pytest.mark.parametrize("scale", [1e30, slow(1e-30)])
def test_norms_of_groups_neither_overflow_nor_vanish(scale: float) -> None:
    x = jnp.full((2, 4), scale, jnp.float32)
    found = group_soft_threshold(x, scale / 4)
    np.testing.assert_allclose(np.asarray(found, np.float64) / scale, 0.75, rtol=1e-5)
    np.testing.assert_array_equal(block_soft_threshold(x, 2 * scale, 8), np.zeros((2, 4)))


@pytest.mark.parametrize("dtype", [jnp.float32, slow(jnp.bfloat16)])
def test_zeros_are_exact_after_the_update(dtype: Any) -> None:
    params = {"w": jnp.asarray(DRAWN[:2].reshape(-1, 4), dtype), "b": jnp.asarray([0.1], dtype)}
    tx = jaxcomm.proximal(optax.sgd(0.0), l1(1.0, mask={"w": True, "b": False}), 0.7)
    updates, state = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    after = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(after["w"] == 0, np.abs(params["w"].astype(jnp.float32)) <= 0.7)
    np.testing.assert_array_equal(after["b"], params["b"])
    assert int(state.step) == 1 and after["w"].dtype == dtype
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), state, after)
    assert bool(jnp.all(updates["w"][after["w"] == 0] == 0))


def test_adam_with_a_schedule_is_the_operator_after_its_step() -> None:
    params, gradient = jnp.linspace(-1, 1, 7), jnp.linspace(1, 2, 7)
    adam, rates = optax.adam(0.1), [0.5, 0.25, 0.0]
    tx = jaxcomm.proximal(adam, l1(0.4), lambda step: jnp.asarray(rates, jnp.float32)[step])
    state, inner = tx.init(params), adam.init(params)
    for rate in rates:
        with jax.numpy_dtype_promotion("standard"):  # For Adam.
            update, state = tx.update(gradient, state, params)
            own, inner = adam.update(gradient, inner, params)
        moved = np.asarray(params + own, np.float64)
        params = params + update
        expected = np.sign(moved) * np.maximum(np.abs(moved) - 0.4 * rate, 0)
        np.testing.assert_allclose(params, expected, atol=1e-6)


@pytest.mark.slow
def test_a_sparsifier_pulls_sparse_updates_exactly() -> None:
    """As a dense pull, bit for bit; and rows of the gradient travel as before."""
    params = {"w": jnp.zeros((8, 6)), "b": jnp.zeros(3)}
    center = jnp.asarray(np.random.default_rng(2).normal(size=(8, 6)), jnp.float32)

    def loss(p: Any, batch: jax.Array) -> jax.Array:
        return jnp.sum((p["w"] - center) ** 2) / 2 * jnp.mean(batch) + jnp.sum(p["b"] ** 2)

    results, sent, ones = [], [], jnp.ones(4)
    for pull in (None, nonzero(density=0.5, granularity="element")):
        inner = jaxcomm.proximal(optax.sgd(0.5), l1(1.0), 0.5)
        tx = jaxcomm.sharded_server(inner, pull=pull, scope="bucket")
        state = jaxcomm.init(tx, params, 4)
        step = jaxcomm.simulate(loss, tx, 4, donate=False)
        sent.append(jaxcomm.wire.account(step, params, state, ones).bytes_per_worker)
        found = params
        for _ in range(3):
            found, state, _ = step(found, state, ones)
        results.append(found)
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert 0.05 < np.mean(np.asarray(results[0]["w"]) != 0) < 0.5
    assert sent[1] < sent[0]


def test_groups_are_not_split_between_servers() -> None:
    grouped = jaxcomm.proximal(optax.sgd(1.0), group_lasso(1.0), 0.1)
    with pytest.raises(ValueError, match="element-wise"):
        jaxcomm.init(jaxcomm.sharded_server(grouped), {"w": jnp.ones((4, 2))}, 2)
