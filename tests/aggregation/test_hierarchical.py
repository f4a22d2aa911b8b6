"""Means over nested axes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import jaxcomm
from jaxcomm import global_qsgd, hierarchical
from tests.aggregation.runs import over, prepared, refuse
from tests.aggregation.test_memory import remainders
from tests.workers import MODE_ROWS, flat, gradients

AXES = ("dcn", "ici")
MESH = jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Auto,) * 2)
SIZES = {"dcn": 2, "ici": 4}
WHERE = pytest.mark.parametrize("where", [MESH, SIZES], ids=["mesh", "simulated"])
MODES = pytest.mark.parametrize("mode", MODE_ROWS)
MEANS = hierarchical(jaxcomm.mean("ici"), jaxcomm.mean("dcn"))


def run(tx: Any, updates: Any, mode: str = "checked", weights: Any = None) -> np.ndarray:
    """The results of eight workers, flat."""

    def one(given: Any) -> Any:
        own, weight = given
        extra = {} if weights is None else {"weight": weight}
        return tx.update(own, tx.init(own), **extra)[0]

    def replica(given: Any) -> Any:
        return jax.tree.map(lambda x: x[None], one(given))

    given = updates, jnp.asarray(np.ones(8) if weights is None else weights, jnp.float32)
    if mode == "vmap":
        nested = jax.vmap(jax.vmap(one, axis_name="ici"), axis_name="dcn")
        groups = jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]), given)
        results = jax.jit(nested)(groups)
        return flat(jax.tree.map(lambda x: x.reshape(8, *x.shape[2:]), results))
    options = {"out_specs": PartitionSpec(AXES), "check_vma": mode == "checked"}
    return flat(over(MESH, AXES, replica, **options)(given))


def mean_of(updates: Any, weights: Any = None) -> np.ndarray:
    """On each of them."""
    return np.tile(np.average(flat(updates), axis=0, weights=weights), (8, 1))


@MODES
@pytest.mark.parametrize("weights", [None, (1, 0, 3, 2, 0, 0, 0, 5)], ids=["equal", "weighted"])
def test_exact_stages_give_the_mean(weights: Any, mode: str) -> None:
    updates = gradients(8)
    expected = mean_of(updates, weights)
    if weights:
        updates["kernel"] = updates["kernel"].at[1].set(jnp.nan)  # Of weight 0.
    np.testing.assert_allclose(run(MEANS, updates, mode, weights), expected, rtol=1e-5, atol=1e-6)


def test_a_group_with_cancelling_weights_is_nan() -> None:
    assert np.isnan(run(MEANS, gradients(8), weights=[1, -1, 0, 0, 1, 1, 1, 1])).all()


def test_inner_stages_draw_independently_in_each_group() -> None:
    # Equal in both groups, so that equal draws would round equally.
    draw = np.random.default_rng(0).normal(size=(4, 300)).astype(np.float32)
    tx = global_qsgd("ici", levels=1)
    one = lambda x: tx.update(x, tx.init(x), outer_axes=("dcn",))[0][None]  # noqa: E731
    seen = over(MESH, AXES, one, out_specs=PartitionSpec("dcn"))(np.tile(draw, (2, 1)))
    assert seen.shape == (2, 300) and np.mean(seen[0] != seen[1]) > 0.2


def loss(params: Any, batch: jax.Array) -> jax.Array:
    return jnp.mean((batch @ params["w"] + params["b"]) ** 2)


START = {"w": jnp.linspace(-1, 1, 50), "b": jnp.float32(0.5)}
BATCH = jnp.asarray(np.random.default_rng(0).normal(size=(16, 50)), jnp.float32)


@WHERE
def test_a_step_sends_float32_over_ici_and_int8_over_dcn(where: Any) -> None:
    tx = hierarchical(jaxcomm.mean("ici"), global_qsgd("dcn", bits=8))
    step, state = prepared(loss, tx, START, where, axis_name=AXES)
    sent = jaxcomm.wire.account(step, START, state, BATCH)
    assert sent.bytes_by_axis == {
        "ici": 2 * 3 / 4 * 4 * 51,
        "dcn": 2 * 1 / 2 * (51 + 4 + 4),
        "dcn,ici": 2 * 7 / 8 * 4,  # The loss.
    }
    assert {str(c.dtype) for c in sent.collectives if c.axes == ("ici",)} == {"float32"}


@WHERE
def test_accumulated_and_skipped_over_both_axes(where: Any) -> None:
    tx = jaxcomm.accumulate(optax.chain(MEANS, optax.sgd(0.1)), 2, axis_name=AXES)
    tx = jaxcomm.skip_nonfinite(tx, axis_name=AXES)
    params, (step, state) = START, prepared(loss, tx, START, where, axis_name=AXES)
    assert state.inner.own.per_worker["dcn,ici"]["mean"]["w"].shape == (8, 50)
    for batch in (BATCH, BATCH.at[3, 2].set(jnp.nan), BATCH):
        params, state, _ = step(params, state, batch)
    assert state.skipped_steps == 1 and state.inner.mini_step == 0
    expected = START["w"] - 0.1 * jax.grad(loss)(START, BATCH)["w"]
    np.testing.assert_allclose(params["w"], expected, rtol=1e-4, atol=1e-5)


def with_memory(axis: str) -> Any:
    return jaxcomm.all_reduce_mean(remainders(), axis_name=axis)


@WHERE
def test_memory_of_the_outermost_stage_differs_over_its_axis_only(where: Any) -> None:
    tx, params = hierarchical(jaxcomm.mean("ici"), with_memory("dcn")), jnp.zeros(3)
    gradient = lambda p, b: jnp.sum(p * jnp.mean(b, axis=0))  # noqa: E731
    step, state = prepared(gradient, tx, params, where, axis_name=AXES)
    rows = np.arange(24.0).reshape(8, 3) / 10
    _, state, _ = step(params, state, jnp.asarray(rows, jnp.float32))
    (kept,), groups = state[1].own.per_worker["dcn"], rows.reshape(2, 4, 3).mean(axis=1)
    np.testing.assert_allclose(kept, groups - np.trunc(groups), atol=1e-6)


@pytest.mark.parametrize("mode", ["checked", "vmap"])
def test_memory_of_an_inner_stage_is_refused(mode: str) -> None:
    tx = hierarchical(with_memory("ici"), jaxcomm.mean("dcn"))
    message = r"'ici' keeps memory, .* differ over \['dcn'\]"
    refuse(message, lambda: run(tx, gradients(8), mode))


def test_an_axis_in_two_stages_is_refused() -> None:
    stages = jaxcomm.mean("ici"), jaxcomm.qsgd(("ici", "dcn"))
    refuse(r"other axes, got \['ici', 'ici', 'dcn'\]", lambda: hierarchical(*stages))
