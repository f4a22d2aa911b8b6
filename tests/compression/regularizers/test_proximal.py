"""Proximal operators against their definition, and proximal steps against closed forms."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm.compression.regularizers import Regularizer, block_lasso, group_lasso, l1
from jaxcomm.compression.regularizers._proximal import (
    block_soft_threshold,
    group_soft_threshold,
    soft_threshold,
)
from jaxcomm.compression.sparsifiers import nonzero
from tests.slow import slow

T = 0.8
SHAPE = (5, 4)
DRAWN = np.random.default_rng(0).standard_t(2, size=(2, 40, *SHAPE))
OPERATORS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "l1": lambda x: soft_threshold(x, T),
    "group": lambda x: group_soft_threshold(x, T),
    "block": lambda x: block_soft_threshold(x, T, 3),
}
GROUPS = {
    "l1": [[j] for j in range(20)],
    "group": [[*range(4 * row, 4 * row + 4)] for row in range(5)],
    "block": [[*range(start, min(start + 3, 20))] for start in range(0, 20, 3)],
}


def operated(name: str, x: np.ndarray) -> np.ndarray:
    """The operator for each of [draws, *shape], in float64 and flat."""
    found = jax.jit(jax.vmap(OPERATORS[name]))(jnp.asarray(x, jnp.float32))
    return np.asarray(found, np.float64).reshape(len(x), -1)


def parts(name: str, x: np.ndarray) -> list[tuple[np.ndarray, float]]:
    """The groups of a flat vector, and the threshold of each."""
    return [(x[inside], T * len(inside) ** 0.5) for inside in map(np.array, GROUPS[name])]


@pytest.mark.parametrize("name", OPERATORS)
def test_moreaus_identity(name: str) -> None:
    """x = prox_f(x) + prox_f*(x), where the conjugate's is the projection on balls."""
    x = DRAWN[0].astype(np.float32).astype(np.float64).reshape(40, -1)
    found = operated(name, DRAWN[0])
    for each, result in zip(x, found, strict=True):
        projected = np.concatenate(
            [p * min(1, most / np.linalg.norm(p)) for p, most in parts(name, each)]
        )
        np.testing.assert_allclose(result + projected, each, rtol=0, atol=1e-5)
    assert 0.1 < np.mean(found == 0) < 0.9


@pytest.mark.parametrize("name", OPERATORS)
def test_firmly_nonexpansive(name: str) -> None:
    """|Px - Py|^2 <= <Px - Py, x - y>, and not equal for all."""
    one, two = (operated(name, x) for x in DRAWN)
    x, y = (each.reshape(40, -1) for each in DRAWN)
    moved, inner = np.sum((one - two) ** 2, axis=1), np.sum((one - two) * (x - y), axis=1)
    assert np.all(moved <= inner * (1 + 1e-6))
    assert np.all(moved < 0.99 * inner)


@pytest.mark.parametrize(
    ("regularizer", "name"),
    [(l1(2.0), "l1"), (group_lasso(2.0), "group"), (block_lasso(2.0, 3), "block")],
    ids=["l1", "group", "block"],
)
def test_no_point_near_it_has_a_smaller_value(regularizer: Regularizer, name: str) -> None:
    """The definition, by brute force: s r(y) + |y - x|^2 / 2 is least, with `value` as r."""
    x, rng = DRAWN[0, 0], np.random.default_rng(1)
    step = T / 2
    y = np.asarray(regularizer.operator(jnp.asarray(x, jnp.float32), step), np.float64)
    np.testing.assert_allclose(y.ravel(), operated(name, x[None])[0], rtol=1e-6)
    away = np.concatenate(
        [size * rng.normal(size=(200, *SHAPE)) * (rng.random((200, *SHAPE)) < 0.3)
         for size in (1.0, 0.1, 0.01)]
    )  # fmt: skip
    values = jax.jit(jax.vmap(regularizer.value))(jnp.asarray(y + away, jnp.float32))
    objective = step * np.asarray(values, np.float64) + np.sum((y + away - x) ** 2, (1, 2)) / 2
    least = step * float(regularizer.value(jnp.asarray(y, jnp.float32))) + np.sum((y - x) ** 2) / 2
    assert np.all(objective >= least - 1e-4)
    r = sum(np.linalg.norm(p) * most for p, most in parts(name, y.ravel())) / T
    np.testing.assert_allclose(regularizer.value(jnp.asarray(y, jnp.float32)), 2 * r, rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_norms_of_groups_neither_overflow_nor_vanish(scale: float) -> None:
    x = jnp.full((2, 4), scale, jnp.float32)
    found = group_soft_threshold(x, scale / 4)
    np.testing.assert_allclose(np.asarray(found, np.float64) / scale, 0.75, rtol=1e-5)
    np.testing.assert_array_equal(block_soft_threshold(x, 2 * scale, 8), np.zeros((2, 4)))


@pytest.mark.parametrize("name", OPERATORS)
def test_nan_and_zero_stay(name: str) -> None:
    x = jnp.zeros(SHAPE).at[1, 2].set(jnp.nan)
    found = OPERATORS[name](x)
    assert bool(jnp.isnan(found[1, 2])) and not bool(jnp.isnan(found[4]).any())
    assert not np.signbit(np.asarray(found[4])).any()


@pytest.fixture(scope="module")
def lasso() -> tuple[np.ndarray, np.ndarray]:
    """On 4 workers with orthogonal designs: the minimizer in closed form, and what is found."""
    rng, workers, d, strength, rate = np.random.default_rng(5), 4, 12, 0.3, 0.5
    design = np.stack([np.linalg.qr(rng.normal(size=(d, d)))[0] for _ in range(workers)])
    targets = rng.normal(size=(workers, d))
    # The mean of |A x - b|^2 / 2 is |x - mean A'b|^2 / 2 and a constant.
    center = np.einsum("nij,ni->j", design, targets) / workers
    tx = jaxcomm.proximal(optax.chain(jaxcomm.mean(), optax.sgd(rate)), l1(strength), rate)

    def loss(x: jax.Array, batch: Any) -> jax.Array:
        return jnp.sum((batch["design"][0] @ x - batch["targets"][0]) ** 2) / 2

    batch = {
        "design": jnp.asarray(design, jnp.float32),
        "targets": jnp.asarray(targets, jnp.float32),
    }
    params = jnp.ones(d)
    state = jaxcomm.init(tx, params, workers)
    step = jaxcomm.simulate(loss, tx, workers)
    for _ in range(60):
        params, state, _ = step(params, state, batch)
    return np.sign(center) * np.maximum(np.abs(center) - strength, 0), np.asarray(params)


def test_lasso_with_orthogonal_designs(lasso: tuple[np.ndarray, np.ndarray]) -> None:
    closed, found = lasso
    assert 2 <= np.count_nonzero(closed) <= 10
    np.testing.assert_allclose(found, closed, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(found == 0, closed == 0)


def test_without_strength_it_is_the_optimizer() -> None:
    tx, x = jaxcomm.proximal(optax.sgd(0.5), l1(0.0), 0.5), jnp.linspace(-1, 1, 7)
    np.testing.assert_array_equal(tx.update(x, tx.init(x), x)[0], -0.5 * x)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_zeros_are_exact_after_the_update(dtype: Any) -> None:
    params = {"w": jnp.asarray(DRAWN[0, :2].reshape(-1, 4), dtype), "b": jnp.asarray([0.1], dtype)}
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
    adam, rates = optax.adam(0.1), [0.5, 0.25]
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


@pytest.mark.parametrize("workers", [slow(1), 4])
def test_a_sparsifier_pulls_sparse_updates_exactly(workers: int) -> None:
    """As a dense pull, bit for bit; and rows of the gradient travel as before."""
    params = {"w": jnp.zeros((8, 6)), "b": jnp.zeros(3)}
    center = jnp.asarray(np.random.default_rng(2).normal(size=(8, 6)), jnp.float32)

    def loss(p: Any, batch: jax.Array) -> jax.Array:
        return jnp.sum((p["w"] - center) ** 2) / 2 * jnp.mean(batch) + jnp.sum(p["b"] ** 2)

    results, sent = [], []
    for pull in (None, nonzero(density=0.5, granularity="element")):
        inner = jaxcomm.proximal(optax.sgd(0.5), l1(1.0), 0.5)
        tx = jaxcomm.sharded_server(inner, pull=pull, scope="bucket")
        state = jaxcomm.init(tx, params, workers)
        step = jaxcomm.simulate(loss, tx, workers, donate=False)
        sent.append(jaxcomm.wire.account(step, params, state, jnp.ones(workers)).bytes_per_worker)
        found = params
        for _ in range(3):
            found, state, _ = step(found, state, jnp.ones(workers))
        results.append(found)
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert 0.05 < np.mean(np.asarray(results[0]["w"]) != 0) < 0.5
    assert workers == 1 or sent[1] < sent[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: jaxcomm.proximal(optax.sgd(1.0), l1(1.0), -0.1),
            "`learning_rate` must be a Python float of at least 0.*got -0.1",
        ),
        (lambda: jaxcomm.proximal(l1(1.0), l1(1.0), 0.1), "`tx` must be an optax transformation"),
    ],
)
def test_mistakes(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_mistakes_in_use() -> None:
    grouped = jaxcomm.proximal(optax.sgd(1.0), group_lasso(1.0), 0.1)
    with pytest.raises(ValueError, match="element-wise"):
        jaxcomm.init(jaxcomm.sharded_server(grouped), {"w": jnp.ones((4, 2))}, 2)
