"""Each device of an island aggregates a slice: the same means, for a share of the bytes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import jaxcomm
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import top_k
from tests.aggregation.test_hierarchical import MESH, MODES, mean_of, program
from tests.slow import slow
from tests.workers import flat, gradients

AXES = ("dcn", "ici")
SIZES = {"dcn": 2, "ici": 4}
RATE = 0.5


def islands(outer: Any) -> Any:
    return jaxcomm.hierarchical(jaxcomm.mean("ici"), jaxcomm.sliced(outer, axis_name="ici"))


@MODES
def test_slices_of_the_mean_are_the_mean(mode: str) -> None:
    """Leaves that four devices divide, and others; a NaN in a worker of weight 0."""
    updates, weights = gradients(8), np.array([1, 0, 3, 2, 0, 0, 0, 5.0])
    updates["rows"] = jnp.asarray(np.random.default_rng(3).normal(size=(8, 12, 2)), jnp.float32)
    kept = weights > 0
    expected = np.average(flat(updates)[kept], axis=0, weights=weights[kept])
    updates["kernel"] = updates["kernel"].at[1].set(jnp.nan)
    results = flat(program(islands(jaxcomm.mean("dcn")), mode, True)(updates, jnp.float32(weights)))
    expected = np.broadcast_to(expected, results.shape)
    np.testing.assert_allclose(results, expected, rtol=1e-5, atol=1e-6)


@MODES
def test_each_slice_is_quantized_once(mode: str) -> None:
    updates = gradients(8)
    results = flat(program(islands(jaxcomm.global_qsgd("dcn")), mode)(updates, jnp.ones(8)))
    assert (results == results[:1]).all()
    off = np.abs(results[0] - mean_of(updates, np.ones(8))).max()
    assert 0 < off < np.abs(flat(updates)).max() / 63


def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    """Its gradient is the mean of the rows of the batch."""
    rows = {"w": batch[:, :48].reshape(-1, 8, 6), "b": batch[:, 48:]}
    terms = jax.tree.map(lambda x, g: jnp.sum(x * g.mean(axis=0)), params, rows)
    return sum(jax.tree.leaves(terms))


START = {"w": np.zeros((8, 6), np.float32), "b": np.zeros(3, np.float32)}
BATCHES = np.random.default_rng(0).normal(size=(3, 16, 51)).astype(np.float32)


def outer() -> Any:
    """A quarter of the coordinates, and the rest later."""
    return jaxcomm.all_gather_mean(error_feedback(top_k(ratio=0.25)), axis_name="dcn")


def explicit() -> Any:
    return jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Explicit,) * 2)


@pytest.mark.parametrize("kind", ["simulated", "automatic", slow("explicit")])
def test_what_is_not_sent_is_kept_by_its_device(kind: str) -> None:
    """Parameters moved by all gradients but the mean of the residuals of the two islands."""
    workers = {"simulated": SIZES, "automatic": MESH, "explicit": None}[kind] or explicit()
    tx = optax.chain(islands(outer()), optax.sgd(RATE))
    make = jaxcomm.simulate if kind == "simulated" else jaxcomm.make_step
    step = make(loss_fn, tx, workers, axis_name=AXES)
    params, state = START, jaxcomm.init(tx, START, workers, axis_name=AXES)
    for batch in BATCHES:
        params, state, _ = step(params, state, jnp.asarray(batch))
    marked = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, jaxcomm.PerWorker))
    own = [x.per_worker["dcn,ici"] for x in marked if "dcn,ici" in getattr(x, "per_worker", ())]
    residuals = [np.asarray(x) for x in jax.tree.leaves(own) if x.ndim > 1]
    assert {len(x) for x in residuals} == {8}
    total = sum(x.reshape(2, -1).mean(axis=0).sum() for x in residuals)
    assert abs(total) > 0.1
    moved = -sum(float(jnp.sum(x)) for x in jax.tree.leaves(params)) / RATE
    np.testing.assert_allclose(moved + total, BATCHES.mean(axis=1).sum(), rtol=1e-4)


def test_the_slow_axis_carries_each_coordinate_once() -> None:
    params = {"w": jnp.zeros((64, 64))}
    rows = jnp.zeros((8, 64 * 64))

    def sent(stage: Any) -> Any:
        tx = optax.chain(jaxcomm.hierarchical(jaxcomm.mean("ici"), stage), optax.sgd(1.0))
        loss = lambda p, b: jnp.sum(p["w"].reshape(-1) * b.mean(axis=0))  # noqa: E731
        step = jaxcomm.make_step(loss, tx, MESH, axis_name=AXES)
        return jaxcomm.wire.account(step, params, jaxcomm.init(tx, params, MESH), rows)

    whole, slices = (
        sent(stage).bytes_by_axis
        for stage in (
            jaxcomm.global_qsgd("dcn"),
            jaxcomm.sliced(jaxcomm.global_qsgd("dcn"), axis_name="ici"),
        )
    )
    assert 0.24 < slices["dcn"] / whole["dcn"] < 0.26
    assert slices["ici"] == whole["ici"] + 64 * 64 * 4 * 3 / 4


def test_one_workers_nan_is_skipped_by_all() -> None:
    """The memory of every slice stays as it was, and the next step goes on."""
    tx = optax.chain(jaxcomm.skip_nonfinite(islands(outer()), axis_name=AXES), optax.sgd(RATE))
    step = jaxcomm.make_step(loss_fn, tx, MESH, axis_name=AXES, donate=False)
    params, state, _ = step(START, jaxcomm.init(tx, START, MESH), jnp.asarray(BATCHES[0]))
    bad = BATCHES[1].copy()
    bad[5, 3] = np.nan
    kept, after, _ = step(params, state, jnp.asarray(bad))
    before, now = (
        [x for x in jax.tree.leaves(tree) if x.ndim and jnp.issubdtype(x.dtype, jnp.floating)]
        for tree in ((params, state), (kept, after))
    )
    for old, new in zip(before, now, strict=True):
        np.testing.assert_array_equal(old, new)
    moved, _, _ = step(kept, after, jnp.asarray(BATCHES[1]))
    assert np.isfinite(moved["w"]).all() and not np.array_equal(moved["w"], kept["w"])


@pytest.mark.parametrize("sizes", [{"dcn": 3, "ici": 2}, {"dcn": 1, "ici": 1}])
def test_other_numbers_of_islands_and_bfloat16(sizes: dict[str, int]) -> None:
    tx = islands(jaxcomm.mean("dcn"))
    values = np.random.default_rng(2).normal(size=(*sizes.values(), 7)).astype(jnp.bfloat16)
    average = lambda x: tx.update(x, tx.init(x))[0]  # noqa: E731
    run = jax.vmap(jax.vmap(average, axis_name="ici"), axis_name="dcn")
    found = np.asarray(jax.jit(run)(jnp.asarray(values)))
    assert found.dtype == jnp.bfloat16
    expected = np.broadcast_to(values.astype(np.float64).mean(axis=(0, 1)), found.shape)
    np.testing.assert_allclose(found.astype(np.float64), expected, atol=2**-7)


def test_updates_that_differ_are_refused() -> None:
    tx = jaxcomm.sliced(jaxcomm.mean("dcn"), axis_name="ici")
    run = lambda x: tx.update(x, tx.init(x))[0]  # noqa: E731
    spec = PartitionSpec(AXES)
    with pytest.raises(ValueError, match=r"`sliced` takes .* differs by worker over \['ici'\]"):
        jax.shard_map(run, mesh=MESH, in_specs=spec, out_specs=spec)(jnp.zeros(8))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jaxcomm.sliced(jaxcomm.mean("dcn"), axis_name="dcn"), "of `sliced` names"),
        (lambda: jaxcomm.sliced(optax.sgd(1.0), axis_name="ici"), "`sliced` takes aggregators"),
        (
            lambda: jaxcomm.sliced(outer(), axis_name="ici").init(START),
            "'dcn' is not bound here",
        ),
    ],
)
def test_mistakes(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
