"""Means of parameters that are sharded over another axis: each shard is averaged separately."""

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
from tests.laws.test_wire import COLLECTIVE
from tests.slow import slow

REPLICATED = PartitionSpec()
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


@pytest.mark.quick(1)
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


@pytest.mark.slow
def test_whole_leaves_beside_shards() -> None:
    """They are averaged on all devices of a worker, in messages of their own."""
    whole, placed = sharded_gradients()
    specs = {"kernel": PartitionSpec(None, "model"), "bias": PartitionSpec()}
    placed["bias"] = jax.device_put(
        whole["bias"], NamedSharding(SHARDED, PartitionSpec("data", None))
    )
    params = jax.tree.map(lambda x: x[0], placed)
    together = jaxcomm.shard_local(jaxcomm.global_qsgd(), specs)
    parted = optax.partition(
        {"cut": jaxcomm.shard_local(jaxcomm.global_qsgd(), specs), "whole": jaxcomm.mean()},
        {"kernel": "cut", "bias": "whole"},
    )
    for tx, bias in ((together, 15), (parted, 1e6)):
        result, _ = on_shards(tx, {"data"})(placed, tx.init(params))
        for name, levels in (("bias", bias), ("kernel", 15)):
            np.testing.assert_allclose(
                result[name], whole[name].mean(axis=0), atol=np.abs(whole[name]).max() / levels
            )


def test_mistakes_of_shards() -> None:
    _, placed = sharded_gradients()
    params = jax.tree.map(lambda x: x[0], placed)
    for tx, message in (
        (jaxcomm.global_qsgd(), r"varies over \['model'\] as well"),
        (
            jaxcomm.shard_local(jaxcomm.mean(), dict.fromkeys(SPECS, PartitionSpec("data"))),
            r"none of the aggregator's \('data',\), .* at \['bias'\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            on_shards(tx, {"data", "model"})(placed, tx.init(params))
    with pytest.raises(ValueError, match="takes aggregators"):
        jaxcomm.shard_local(optax.sgd(0.1), SPECS)
    shared = dither().replace(init=lambda x: jaxcomm.Memory((), jnp.zeros(2)))
    tx = jaxcomm.shard_local(jaxcomm.all_reduce_mean(shared), SPECS)
    with pytest.raises(ValueError, match=r"state at .shared\[0\] was made without \('model',\)"):
        on_shards(tx, {"data", "model"})(placed, tx.init(params))
