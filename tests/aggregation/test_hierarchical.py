"""Means over nested axes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import jaxcomm
from tests.aggregation.test_memory import remainders
from tests.slow import slow
from tests.workers import MODE_ROWS, flat, gradients

AXES = ("dcn", "ici")
MESH = jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Auto,) * 2)
MODES = pytest.mark.parametrize("mode", MODE_ROWS)
REPLICATED = PartitionSpec()


def program(tx: Any, mode: str, weighted: bool = False) -> Any:
    """`(updates [8, ...], weights [8]) -> results [8, ...]`, jitted."""

    def one(updates: Any, weight: jax.Array) -> Any:
        extra = {"weight": weight} if weighted else {}
        return tx.update(updates, tx.init(updates), **extra)[0]

    def local(updates: Any, weights: jax.Array) -> Any:
        results = one(jax.tree.map(lambda x: x[0], updates), weights[0])
        return jax.tree.map(lambda x: x[None], results)

    if mode == "vmap":

        def simulated(updates: Any, weights: jax.Array) -> Any:
            nest = lambda x: x.reshape(2, 4, *x.shape[1:])  # noqa: E731
            over_ici = jax.vmap(one, axis_name="ici")
            results = jax.vmap(over_ici, axis_name="dcn")(*jax.tree.map(nest, (updates, weights)))
            return jax.tree.map(lambda x: x.reshape(8, *x.shape[2:]), results)

        return jax.jit(simulated)
    spec = PartitionSpec(AXES)
    return jax.jit(
        jax.shard_map(local, mesh=MESH, in_specs=spec, out_specs=spec, check_vma=mode == "checked")
    )


def mean_of(updates: Any, weights: np.ndarray) -> np.ndarray:
    return np.average(flat(updates), axis=0, weights=weights)


@MODES
def test_exact_stages_give_the_mean(mode: str) -> None:
    updates = gradients(8)
    tx = jaxcomm.hierarchical(jaxcomm.mean("ici"), jaxcomm.mean("dcn"))
    results = flat(program(tx, mode)(updates, jnp.ones(8)))
    np.testing.assert_allclose(
        results, np.broadcast_to(mean_of(updates, np.ones(8)), results.shape), rtol=1e-5, atol=1e-6
    )


@MODES
def test_weights_count_through_all_stages(mode: str) -> None:
    updates, weights = gradients(8), np.array([1, 0, 3, 2, 0, 0, 0, 5.0])
    updates["kernel"] = updates["kernel"].at[1].set(jnp.nan)  # Of weight 0.
    tx = jaxcomm.hierarchical(jaxcomm.mean("ici"), jaxcomm.mean("dcn"))
    results = flat(program(tx, mode, weighted=True)(updates, jnp.float32(weights)))
    kept = weights > 0
    expected = np.average(flat(updates)[kept], axis=0, weights=weights[kept])
    np.testing.assert_allclose(
        results, np.broadcast_to(expected, results.shape), rtol=1e-5, atol=1e-6
    )


def test_a_group_whose_weights_cancel_is_no_group_without_weight() -> None:
    tx = jaxcomm.hierarchical(jaxcomm.mean("ici"), jaxcomm.mean("dcn"))
    weights = jnp.array([1, -1, 0, 0, 1, 1, 1, 1.0])
    assert np.all(np.isnan(flat(program(tx, "checked", weighted=True)(gradients(8), weights))))


@pytest.mark.slow
@pytest.mark.parametrize(
    "stages",
    [
        (jaxcomm.global_qsgd("ici"), jaxcomm.qsgd("dcn")),
        slow((jaxcomm.mean("ici"), jaxcomm.global_qsgd("dcn"))),
        slow((jaxcomm.qsgd("ici"), jaxcomm.mean("dcn"))),
    ],
)
def test_modes_agree_and_err_little(stages: Any) -> None:
    updates, tx = gradients(8), jaxcomm.hierarchical(*stages)
    checked, unchecked, simulated = (
        flat(program(tx, mode)(updates, jnp.ones(8))) for mode in ("checked", "unchecked", "vmap")
    )
    np.testing.assert_array_equal(checked, unchecked)
    np.testing.assert_allclose(checked, simulated, rtol=0, atol=1e-5)
    assert (checked == checked[:1]).all()
    largest = np.abs(flat(updates)).max()
    off = np.abs(checked[0] - mean_of(updates, np.ones(8))).max()
    assert 0 < off < (1 / 15 + 1 / 15) * largest


def test_inner_stages_draw_apart_in_each_group() -> None:
    # Alike in both groups, so that equal draws would round equally.
    draw = np.random.default_rng(0).normal(size=(4, 300)).astype(np.float32)
    tx = jaxcomm.global_qsgd("ici", levels=1)
    seen = []

    def one(x: jax.Array) -> jax.Array:
        return tx.update(x[0], tx.init(x[0]), outer_axes=("dcn",))[0][None]

    run = jax.shard_map(
        one, mesh=MESH, in_specs=PartitionSpec(AXES), out_specs=PartitionSpec("dcn")
    )
    seen = np.asarray(jax.jit(run)(jnp.concatenate([draw, draw])))
    assert seen.shape == (2, 300) and (seen[0] != seen[1]).mean() > 0.2


def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    return jnp.mean((batch @ params["w"] + params["b"]) ** 2)


def start() -> Any:
    return {"w": jnp.linspace(-1, 1, 50), "b": jnp.float32(0.5)}


BATCH = jnp.asarray(np.random.default_rng(0).normal(size=(16, 50)), jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mesh", slow("simulated")])
def test_a_step_trains_and_sends_float32_over_ici_and_int8_over_dcn(kind: str) -> None:
    stages = jaxcomm.hierarchical(jaxcomm.mean("ici"), jaxcomm.global_qsgd("dcn", bits=8))
    tx = optax.chain(stages, optax.sgd(0.05, momentum=0.9))
    workers = MESH if kind == "mesh" else {"dcn": 2, "ici": 4}
    make = jaxcomm.make_step if kind == "mesh" else jaxcomm.simulate
    step = make(loss_fn, tx, workers, axis_name=AXES)
    params, state = start(), jaxcomm.init(tx, start(), workers, axis_name=AXES)
    sent = jaxcomm.wire.account(step, params, state, BATCH)
    assert sent.bytes_by_axis == {
        "ici": 2 * 3 / 4 * 4 * 51,
        "dcn": 2 * 1 / 2 * (51 + 4 + 4),
        "dcn,ici": 2 * 7 / 8 * 4,  # The loss.
    }
    assert {str(c.dtype) for c in sent.collectives if c.axes == ("ici",)} == {"float32"}
    losses = []
    for count in range(20):
        params, state, metrics = step(params, state, BATCH)
        losses.append(float(metrics["loss"]))
        if count == 0:  # 63 levels of the largest coordinate of any group's mean.
            groups = [jax.grad(loss_fn)(start(), rows)["w"] for rows in jnp.split(BATCH, 2)]
            expected = start()["w"] - 0.05 * (groups[0] + groups[1]) / 2
            level = 0.05 * np.abs(groups).max() / 63
            np.testing.assert_allclose(params["w"], expected, rtol=1e-5, atol=level)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("kind", ["mesh", slow("simulated")])
def test_accumulated_and_skipped_over_both_axes(kind: str) -> None:
    stages = jaxcomm.hierarchical(jaxcomm.mean("ici"), jaxcomm.mean("dcn"))
    tx = jaxcomm.accumulate(optax.chain(stages, optax.sgd(0.1)), 2, axis_name=AXES)
    tx = jaxcomm.skip_nonfinite(tx, axis_name=AXES)
    workers = MESH if kind == "mesh" else {"dcn": 2, "ici": 4}
    make = jaxcomm.make_step if kind == "mesh" else jaxcomm.simulate
    step = make(loss_fn, tx, workers, axis_name=AXES)
    params, state = start(), jaxcomm.init(tx, start(), workers, axis_name=AXES)
    assert state.inner.own.per_worker["dcn,ici"]["mean"]["w"].shape == (8, 50)
    for batch in (BATCH, BATCH.at[3, 2].set(jnp.nan), BATCH):
        params, state, _ = step(params, state, batch)
    assert state.skipped_steps == 1 and state.inner.mini_step == 0
    expected = start()["w"] - 0.1 * jax.grad(loss_fn)(start(), BATCH)["w"]
    np.testing.assert_allclose(params["w"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_without_it_autodiff_sums_over_the_inner_axis() -> None:
    tx = optax.chain(jaxcomm.global_qsgd("dcn", bits=16), optax.sgd(1.0))

    def train_step(params: Any, state: Any, batch: Any) -> Any:
        _, grads = jaxcomm.local_value_and_grad(loss_fn, axis_name="dcn")(params, batch)
        grads = jax.tree.map(lambda g: g / jax.lax.axis_size("ici"), grads)
        updates, state = tx.update(grads, state, params)
        return updates, state

    state = jaxcomm.init(tx, start(), MESH)
    specs = jaxcomm.state_specs(state)
    step = jax.jit(
        jax.shard_map(
            train_step,
            mesh=MESH,
            in_specs=(REPLICATED, specs, PartitionSpec(AXES)),
            out_specs=(REPLICATED, specs),
        )
    )
    updates, _ = step(start(), state, BATCH)
    expected = jax.grad(loss_fn)(start(), BATCH)
    largest = 4 * np.abs(expected["w"]).max()
    np.testing.assert_allclose(-updates["w"], expected["w"], atol=largest / 1000)
    sent = jaxcomm.wire.account(step, start(), state, BATCH)
    assert sent.bytes_by_axis == {"ici": 2 * 3 / 4 * 4 * 51, "dcn": 4 * 26 + 4 + 4}
    over_ici = [c for c in sent.collectives if c.axes == ("ici",)]
    assert {str(c.dtype) for c in over_ici} == {"float32"}


@MODES
def test_a_nan_in_one_group_is_seen_in_all(mode: str) -> None:
    updates = gradients(8)
    updates["scale"] = updates["scale"].at[5].set(jnp.nan)
    tx = jaxcomm.hierarchical(jaxcomm.mean("ici"), jaxcomm.global_qsgd("dcn"))
    assert np.isnan(flat(program(tx, mode)(updates, jnp.ones(8)))).all()


def test_memory_of_the_outermost_stage_differs_over_its_axis_only() -> None:
    tx = jaxcomm.hierarchical(
        jaxcomm.mean("ici"), jaxcomm.all_reduce_mean(remainders(), axis_name="dcn")
    )
    params, gradient = jnp.zeros(3), lambda p, b: jnp.sum(p * jnp.mean(b, axis=0))
    rows = jnp.arange(24.0).reshape(8, 3) / 10
    for workers, make in ((MESH, jaxcomm.make_step), ({"dcn": 2, "ici": 4}, jaxcomm.simulate)):
        step = make(gradient, tx, workers, axis_name=AXES)
        state = jaxcomm.init(tx, jnp.zeros(3), workers, axis_name=AXES)
        assert state[1].own.per_worker["dcn"][0].shape == (2, 3)
        _, state, _ = step(jnp.copy(params), state, rows)
        groups = np.asarray(rows).reshape(2, 4, 3).mean(axis=1)
        np.testing.assert_allclose(
            state[1].own.per_worker["dcn"][0], groups - np.trunc(groups), atol=1e-6
        )


def test_mistakes() -> None:
    updates, weights = gradients(8), jnp.ones(8)
    with_memory = jaxcomm.all_reduce_mean(remainders(), axis_name="ici")
    tx = jaxcomm.hierarchical(with_memory, jaxcomm.mean("dcn"))
    for mode in ("checked", "vmap"):
        with pytest.raises(ValueError, match=r"'ici' keeps memory, .* differ over \['dcn'\]"):
            program(tx, mode)(updates, weights)
    with pytest.raises(ValueError, match="one or more stages"):
        jaxcomm.hierarchical()
    with pytest.raises(ValueError, match=r"other axes, got \['ici', 'ici', 'dcn'\]"):
        jaxcomm.hierarchical(jaxcomm.mean("ici"), jaxcomm.qsgd(("ici", "dcn")))
    with pytest.raises(ValueError, match="takes aggregators"):
        jaxcomm.hierarchical(jaxcomm.mean("ici"), optax.sgd(0.1))
    for alone in (jaxcomm.mean("ici"), jaxcomm.hierarchical(jaxcomm.global_qsgd("ici"))):
        with pytest.raises(ValueError, match=r"varies over \['dcn'\] as well"):
            program(alone, "checked")(updates, weights)
