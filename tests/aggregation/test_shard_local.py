"""Means of parameters that are sharded over another axis: each shard is averaged separately."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm import global_qsgd, shard_local
from tests.aggregation.runs import refuse
from tests.slow import slow

SHARDED = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
SPECS = {"kernel": P(None, "model"), "bias": P("model")}
SHAPES = {"kernel": (16, 128), "bias": (128,)}


WHOLE = {
    name: np.random.default_rng(3).normal(size=(2, *shape)).astype(np.float32)
    for name, shape in SHAPES.items()
}


def placed(rows: Any = WHOLE, specs: Any = SPECS) -> Any:
    """Two workers' gradients [2, ...], over the mesh."""
    put = lambda x, spec: jax.device_put(x, NamedSharding(SHARDED, P("data", *spec)))  # noqa: E731
    return {name: put(x, specs[name]) for name, x in rows.items()}


def on_shards(tx: Any, manual: set[str], check: bool = True) -> Any:
    """`updates -> mean`, the axes of `manual` manual, the others automatic."""
    full = manual == {"data", "model"}
    layout = {k: s if full else P() for k, s in SPECS.items()}

    def local(updates: Any) -> Any:
        own = jax.tree.map(lambda x: x[0], updates)
        return tx.update(own, tx.init(own))[0]

    run = jax.shard_map(
        local,
        mesh=SHARDED,
        in_specs=({k: P("data", *s) for k, s in layout.items()},),
        out_specs=layout,
        axis_names=manual,
        check_vma=check,
    )
    return jax.jit(run, out_shardings={k: NamedSharding(SHARDED, s) for k, s in SPECS.items()})


METHODS = [global_qsgd, jaxcomm.mean, jaxcomm.qsgd]


@pytest.mark.parametrize(
    ("method", "manual", "check"),
    [
        (global_qsgd, {"data"}, True),
        *(slow(method, {"data", "model"}, True) for method in METHODS),
        *(slow(method, {"data"}, False) for method in METHODS),
    ],
)
def test_shards_are_averaged_in_place(method: Any, manual: set[str], check: bool) -> None:
    run, given = on_shards(shard_local(method("data"), SPECS), manual, check), placed()
    result, exact = run(given), method is jaxcomm.mean
    bound = max(np.abs(x).max() for x in WHOLE.values()) / (1e6 if exact else 15)
    for name, x in WHOLE.items():
        np.testing.assert_allclose(result[name], x.mean(axis=0), atol=bound)
        assert result[name].sharding.spec == SPECS[name]
    found = jaxcomm.wire.account(run.lower(given)).collectives
    kind = "all_gather" if method is jaxcomm.qsgd else "all_reduce"
    assert {(c.kind, c.axes) for c in found} == {(kind, ("data",))}
    sent = jaxcomm.wire.account(run, given)
    assert set(sent.bytes_by_axis) == {"data"}
    assert sent.bytes_per_worker <= (4 if exact else 1) * (16 * 128 + 128) // 4 + 8 * 2


def test_shards_have_separate_norms_and_draws() -> None:
    tx = shard_local(global_qsgd("data", levels=1), SPECS)
    # The same shard on all devices of the model axis, each larger than the one before.
    same = {
        k: np.concatenate([x[..., :32] * 10**i for i in range(4)], -1) for k, x in WHOLE.items()
    }
    result = on_shards(tx, {"data"})(placed(same))
    shards = np.split(np.asarray(result["kernel"]), 4, axis=-1)
    norms = [np.abs(shard).max() for shard in shards]
    np.testing.assert_allclose(norms[1:] / norms[0], [10, 100, 1000], rtol=1e-3)
    differing = [(np.sign(a) != np.sign(b)).mean() for a, b in itertools.pairwise(shards)]
    assert min(differing) > 0.2


MISTAKES = {
    r"varies over \['model'\] as well": global_qsgd(),
    r"none of the aggregator's \('data',\), .* at \['bias'\]": shard_local(
        jaxcomm.mean(), dict.fromkeys(SPECS, P("data"))
    ),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_of_shards(message: str) -> None:
    refuse(message, lambda: on_shards(MISTAKES[message], {"data", "model"})(placed()))
