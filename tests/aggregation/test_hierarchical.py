"""Means over nested axes, and beside parameters that are sharded over another axis."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxcomm
from jaxcomm.compression.quantizers import dither
from tests.aggregation.test_memory import remainders
from tests.laws.test_wire import COLLECTIVE
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
    tx = jaxcomm.accumulate(optax.chain(stages, optax.sgd(0.1)), 2, AXES)
    tx = jaxcomm.skip_nonfinite(tx, AXES)
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
    tx = jaxcomm.hierarchical(jaxcomm.mean("ici"), jaxcomm.all_reduce_mean("dcn", remainders()))
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
    with_memory = jaxcomm.all_reduce_mean("ici", remainders())
    tx = jaxcomm.hierarchical(with_memory, jaxcomm.mean("dcn"))
    for mode in ("checked", "vmap"):
        with pytest.raises(ValueError, match=r"'ici' keeps memory, .* differ over \['dcn'\]"):
            program(tx, mode)(updates, weights)
    with pytest.raises(ValueError, match="at least one"):
        jaxcomm.hierarchical()
    with pytest.raises(ValueError, match=r"an axis twice: \['ici', 'ici', 'dcn'\]"):
        jaxcomm.hierarchical(jaxcomm.mean("ici"), jaxcomm.qsgd(("ici", "dcn")))
    with pytest.raises(ValueError, match="takes aggregators"):
        jaxcomm.hierarchical(jaxcomm.mean("ici"), optax.sgd(0.1))
    for alone in (jaxcomm.mean("ici"), jaxcomm.hierarchical(jaxcomm.global_qsgd("ici"))):
        with pytest.raises(ValueError, match=r"varies over \['dcn'\] as well"):
            program(alone, "checked")(updates, weights)


# Beside parameters that are sharded over another axis.

SHARDED = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
SPECS = {"kernel": PartitionSpec(None, "model"), "bias": PartitionSpec("model")}
SHAPES = {"kernel": (16, 128), "bias": (128,)}


def sharded_gradients() -> tuple[Any, Any]:
    """Two workers' gradients, as NumPy [2, ...] and laid over the mesh."""
    rng = np.random.default_rng(3)
    whole = {k: rng.normal(size=(2, *s)).astype(np.float32) for k, s in SHAPES.items()}
    placed = {
        k: jax.device_put(v, NamedSharding(SHARDED, PartitionSpec("data", *SPECS[k])))
        for k, v in whole.items()
    }
    return whole, placed


def on_shards(tx: Any, manual: set[str], check: bool = True) -> Any:
    """`(updates, state) -> (mean, state)`, the axes of `manual` manual, the others automatic."""
    full = manual == {"data", "model"}
    layout = {k: s if full else PartitionSpec() for k, s in SPECS.items()}

    def local(updates: Any, state: Any) -> Any:
        return tx.update(jax.tree.map(lambda x: x[0], updates), state)

    return jax.jit(
        jax.shard_map(
            local,
            mesh=SHARDED,
            in_specs=({k: PartitionSpec("data", *s) for k, s in layout.items()}, REPLICATED),
            out_specs=(layout, REPLICATED),
            axis_names=manual,
            check_vma=check,
        ),
        out_shardings=({k: NamedSharding(SHARDED, s) for k, s in SPECS.items()}, None),
    )


# Device 4 d + m holds shard m of worker d: only pairs of equal m may talk. As XLA writes them.
OVER_DATA = (
    "replica_groups={{0,4},{1,5},{2,6},{3,7}}",
    "replica_groups=[4,2]<=[2,4]T(1,0)",
    "replica_groups=mesh['data'=2,'model'=4] {'data'}",
)


def collectives(run: Any, *args: Any) -> list[str]:
    """The lines of the compiled program that communicate."""
    text = run.lower(*args).compile().as_text()
    return [line for line in text.splitlines() if COLLECTIVE.search(line)]


MANUAL = pytest.mark.parametrize("manual", [{"data"}, {"data", "model"}], ids=["partial", "full"])


@MANUAL
@pytest.mark.parametrize("check", [True, slow(False)])
@pytest.mark.parametrize("method", [jaxcomm.global_qsgd, slow(jaxcomm.mean), slow(jaxcomm.qsgd)])
def test_shards_are_averaged_where_they_are(method: Any, manual: set[str], check: bool) -> None:
    whole, placed = sharded_gradients()
    tx = jaxcomm.shard_local(method("data"), SPECS)
    run, state = on_shards(tx, manual, check), tx.init(jax.tree.map(lambda x: x[0], placed))
    result, after = run(placed, state)
    bound = max(np.abs(x).max() for x in whole.values()) / (1e6 if method is jaxcomm.mean else 15)
    for name, x in whole.items():
        np.testing.assert_allclose(result[name], x.mean(axis=0), atol=bound)
        assert result[name].sharding.spec == SPECS[name]
    assert jax.tree.structure(after) == jax.tree.structure(state)
    lines = collectives(run, placed, state)
    kind = " all-gather(" if method is jaxcomm.qsgd else " all-reduce("
    assert lines and all(kind in line for line in lines)
    assert all(any(groups in line for groups in OVER_DATA) for line in lines)
    sent = jaxcomm.wire.account(run, placed, state)
    assert set(sent.bytes_by_axis) == {"data"}
    coordinates = (16 * 128 + 128) // 4
    codes = 4 * coordinates if method is jaxcomm.mean else coordinates
    assert sent.bytes_per_worker <= codes + 8 * 2


@pytest.mark.slow
@pytest.mark.parametrize("method", [jaxcomm.global_qsgd, slow(jaxcomm.qsgd)])
def test_without_shard_local_the_partitioner_gathers_shards(method: Any) -> None:
    _, placed = sharded_gradients()
    tx = method("data")
    run, state = on_shards(tx, {"data"}), tx.init(jax.tree.map(lambda x: x[0], placed))
    others = [
        line
        for line in collectives(run, placed, state)
        if not any(groups in line for groups in OVER_DATA)
    ]
    assert any(" all-gather(" in line and "f32[2048]" in line for line in others)


def test_shards_have_norms_and_draws_of_their_own() -> None:
    whole, placed = sharded_gradients()
    tx = jaxcomm.shard_local(jaxcomm.global_qsgd("data", levels=1), SPECS)
    same = {  # The same shard on all devices of the model axis, each larger than the one before.
        k: jax.device_put(
            np.concatenate([v[..., :32] * 10**i for i in range(4)], axis=-1), placed[k].sharding
        )
        for k, v in whole.items()
    }
    result, _ = on_shards(tx, {"data"})(same, tx.init(jax.tree.map(lambda x: x[0], same)))
    shards = np.split(np.asarray(result["kernel"]), 4, axis=-1)
    norms = [np.abs(shard).max() for shard in shards]
    np.testing.assert_allclose(norms[1:] / norms[0], [10, 100, 1000], rtol=1e-3)
    apart = [(np.sign(a) != np.sign(b)).mean() for a, b in itertools.pairwise(shards)]
    assert min(apart) > 0.2


def test_whole_leaves_go_another_way() -> None:
    whole, placed = sharded_gradients()
    specs = {"kernel": PartitionSpec(None, "model"), "bias": PartitionSpec()}
    placed["bias"] = jax.device_put(
        whole["bias"], NamedSharding(SHARDED, PartitionSpec("data", None))
    )
    params = jax.tree.map(lambda x: x[0], placed)
    alone = jaxcomm.shard_local(jaxcomm.global_qsgd(), specs)
    with pytest.raises(ValueError, match=r"over the same axes.*'bias'\]\": \[\].*optax.partition"):
        on_shards(alone, {"data"})(placed, alone.init(params))
    tx = optax.partition(
        {"cut": alone, "whole": jaxcomm.mean()}, {"kernel": "cut", "bias": "whole"}
    )
    result, _ = on_shards(tx, {"data"})(placed, tx.init(params))
    np.testing.assert_allclose(result["bias"], whole["bias"].mean(axis=0), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(
        result["kernel"], whole["kernel"].mean(axis=0), atol=np.abs(whole["kernel"]).max() / 15
    )


def test_mistakes_of_shards() -> None:
    _, placed = sharded_gradients()
    params = jax.tree.map(lambda x: x[0], placed)
    for tx, message in (
        (jaxcomm.global_qsgd(), r"varies over \['model'\] as well"),
        (jaxcomm.shard_local(jaxcomm.mean(), {"kernel": SPECS["kernel"]}), r"at \['bias'\]"),
        (
            jaxcomm.shard_local(jaxcomm.mean(), dict.fromkeys(SPECS, PartitionSpec("data"))),
            r"not over \('data',\), the axes of the aggregator",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            on_shards(tx, {"data", "model"})(placed, tx.init(params))
    lacking = jaxcomm.shard_local(jaxcomm.mean(), dict.fromkeys(SPECS, PartitionSpec("tensor")))
    with pytest.raises(ValueError, match=r"`specs` name \['tensor'\]"):
        on_shards(lacking, {"data"})(placed, lacking.init(params))
    with pytest.raises(ValueError, match="takes aggregators"):
        jaxcomm.shard_local(optax.sgd(0.1), SPECS)
    shared = dither()._replace(init=lambda x: jaxcomm.Memory((), jnp.zeros(2)))
    tx = jaxcomm.shard_local(jaxcomm.all_reduce_mean("data", shared), SPECS)
    with pytest.raises(ValueError, match="memory"):
        on_shards(tx, {"data", "model"})(placed, tx.init(params))
