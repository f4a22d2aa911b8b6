"""ACP-SGD: one factor per step, against NumPy, in one collective, and as an aggregator."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxcomm
from jaxcomm import Claims, Context
from jaxcomm.aggregation._warmup import in_stages
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.low_rank import projection
from jaxcomm.testing import check_codec
from tests.low_rank import of_matrices

WORKERS, STEPS, ROWS, COLUMNS, RANK = 3, 6, 12, 7, 2


@functools.cache
def updates() -> np.ndarray:
    """A common part and local parts, [steps, workers, rows, columns]."""
    rng = np.random.default_rng(0)
    common = rng.normal(size=(1, 1, ROWS, COLUMNS))
    return np.asarray(common + rng.normal(size=(STEPS, WORKERS, ROWS, COLUMNS)), np.float32)


def acp_sgd(given: np.ndarray, right: np.ndarray) -> list[np.ndarray]:
    """The means of ACP-SGD as published, in float64."""
    residuals, left, means = np.zeros(given.shape[1:]), np.empty(0), []
    for step, matrices in enumerate(given.astype(np.float64)):
        inputs = matrices + residuals
        if step % 2 == 0:
            basis, _ = np.linalg.qr(right)
            left = (inputs @ basis).mean(axis=0)
            means.append(left @ basis.T)
            residuals = inputs - inputs @ basis @ basis.T
        else:
            basis, _ = np.linalg.qr(left)
            right = (np.swapaxes(inputs, 1, 2) @ basis).mean(axis=0)
            means.append(basis @ right.T)
            residuals = inputs - basis @ (basis.T @ inputs)
    return means


def run(tx: Any, given: Any) -> tuple[Any, Any]:
    """The means of every step on every worker, and the last states."""

    def worker(steps: Any) -> Any:
        first = jax.tree.map(lambda x: x[0], steps)
        return jax.lax.scan(lambda s, x: tx.update(x, s)[::-1], tx.init(first), steps)

    states, means = jax.jit(jax.vmap(worker, in_axes=1, out_axes=(0, 1), axis_name="data"))(given)
    return jax.tree.map(np.asarray, means), states


def test_is_acp_sgd_without_drawn_columns() -> None:
    codecs = {side: projection(RANK, side, drawn=0) for side in ("right", "left")}
    stages = [
        jaxcomm.all_reduce_mean("data", error_feedback(codec._replace(claims=Claims(bounded=True))))
        for codec in codecs.values()
    ]
    tx = in_stages(stages, lambda step: step % 2, "power_sgd")
    start = codecs["right"].init(jnp.zeros((ROWS, COLUMNS))).shared.right
    means, _ = run(tx, updates())
    for found, expected in zip(means, acp_sgd(updates(), np.asarray(start)), strict=True):
        np.testing.assert_allclose(found, np.tile(expected, (WORKERS, 1, 1)), atol=1e-4)


def test_nothing_is_lost() -> None:
    means, states = run(jaxcomm.power_sgd(rank=RANK, alternate=True), updates())
    (own,) = jax.tree.leaves(states.inner.own)
    left = np.asarray(own, np.float64).reshape(WORKERS, ROWS, COLUMNS).mean(axis=0)
    sent = means[:, 0].astype(np.float64).sum(axis=0)
    np.testing.assert_allclose(sent + left, updates().mean(axis=1).sum(axis=0), atol=1e-4)


def test_matrices_of_the_rank_arrive_in_full_from_the_second_step_on() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(ROWS, RANK)) @ rng.normal(size=(RANK, COLUMNS))
    given = np.asarray(np.broadcast_to(x, (8, WORKERS, ROWS, COLUMNS)), np.float32)
    means, _ = run(jaxcomm.power_sgd(rank=RANK, alternate=True), given)
    np.testing.assert_allclose(means.sum(axis=0)[0], 8 * x, atol=1e-3)


@pytest.mark.parametrize("side, numbers", [("right", ROWS), ("left", COLUMNS)])
def test_a_step_sends_one_factor_in_one_collective(side: Any, numbers: int) -> None:
    aggregator = jaxcomm.all_reduce_mean("data", error_feedback(projection(RANK, side)))
    tx = optax.chain(aggregator, optax.sgd(0.1))
    x = jnp.asarray(updates()[0, 0])
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
    step = jaxcomm.make_step(
        lambda params, batch: jnp.mean(batch) * jnp.sum(params["w"] ** 2 * x) + params["b"].sum(),
        tx,
        mesh,
        metrics="own",
    )
    params = {"w": x, "b": jnp.ones(5)}
    account = jaxcomm.wire.account(step, params, jaxcomm.init(tx, params, mesh), jnp.ones(4))
    assert [each.primitive for each in account.collectives] == ["all_reduce"]
    assert account.bytes_per_worker == 2 * 3 / 4 * 4 * ((RANK + 1) * numbers + 5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("leaf", ["w", "b"])
def test_one_worker_that_is_not_finite(bad: float, leaf: str) -> None:
    tx = jaxcomm.power_sgd(rank=RANK, alternate=True)
    given = {"w": updates().copy(), "b": np.ones((STEPS, WORKERS, 5), np.float32)}
    for step in (2, 3):  # One step of each side.
        given[leaf][step, 1].flat[3] = bad
    means, states = run(tx, given)
    for name in given:
        assert np.isnan(means[name][2:4]).all()
        assert np.isfinite(means[name][[0, 1, 4, 5]]).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(states.inner.shared))


@pytest.mark.parametrize("side", ["right", "left"])
def test_keeps_the_laws_of_codecs(side: Any) -> None:
    check_codec(of_matrices(projection(RANK, side), columns=6))
    check_codec(projection(RANK, side))


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="`side` must be one of"):
        projection(1, "top")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`memory_rank` cannot be combined"):
        jaxcomm.power_sgd(rank=1, memory_rank=2, alternate=True)


def test_a_leaf_with_a_large_factor_is_exact() -> None:
    codec, x = projection(2, "right"), jnp.ones((3, 40))
    assert codec.init(x).shared == ()
    payload, _ = codec.encode(Context.of(x), x)
    np.testing.assert_array_equal(payload.values, x)
