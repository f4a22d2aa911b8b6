"""Each device of an island aggregates a slice: the same means, for a share of the bytes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import jaxcomm
from jaxcomm import sliced
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import top_k
from tests.aggregation.runs import averaged, prepared, refuse, require_same
from tests.aggregation.test_hierarchical import AXES, MESH, MODES, SIZES, mean_of, run
from tests.slow import slow
from tests.workers import flat, gradients

RATE = 0.5


def islands(outer: Any) -> Any:
    return jaxcomm.hierarchical(jaxcomm.mean("ici"), sliced(outer, axis_name="ici"))


@MODES
def test_slices_of_the_mean_are_the_mean(mode: str) -> None:
    """Leaves that four devices divide, and others; a NaN in a worker of weight 0."""
    updates, weights = gradients(8), [1, 0, 3, 2, 0, 0, 0, 5]
    updates["rows"] = jnp.asarray(np.random.default_rng(3).normal(size=(8, 12, 2)), jnp.float32)
    expected = mean_of(updates, weights)
    updates["kernel"] = updates["kernel"].at[1].set(jnp.nan)
    results = run(islands(jaxcomm.mean("dcn")), updates, mode, weights)
    np.testing.assert_allclose(results, expected, rtol=1e-5, atol=1e-6)


@MODES
def test_each_slice_is_quantized_once(mode: str) -> None:
    updates = gradients(8)
    results = run(islands(jaxcomm.global_qsgd("dcn")), updates, mode)
    assert (results == results[:1]).all()
    off = np.abs(results - mean_of(updates)).max()
    assert 0 < off < np.abs(flat(updates)).max() / 63


def loss(params: Any, batch: jax.Array) -> jax.Array:
    """Its gradient is the mean of the rows of the batch."""
    rows = {"w": batch[:, :48].reshape(-1, 8, 6), "b": batch[:, 48:]}
    terms = jax.tree.map(lambda x, g: jnp.sum(x * g.mean(axis=0)), params, rows)
    return sum(jax.tree.leaves(terms))


START = {"w": np.zeros((8, 6), np.float32), "b": np.zeros(3, np.float32)}
BATCHES = np.random.default_rng(0).normal(size=(3, 16, 51)).astype(np.float32)
# A quarter of the coordinates, and the rest later.
OUTER = jaxcomm.all_gather_mean(error_feedback(top_k(ratio=0.25)), axis_name="dcn")
EXPLICIT = jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Explicit,) * 2)


@pytest.mark.parametrize("where", [SIZES, slow(MESH), slow(EXPLICIT)])
def test_residuals_stay_on_their_device(where: Any) -> None:
    """Parameters moved by all gradients but the mean of the residuals of the two islands."""
    tx = optax.chain(islands(OUTER), optax.sgd(RATE))
    params, (step, state) = START, prepared(loss, tx, START, where, axis_name=AXES)
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
    params, coded = {"w": jnp.zeros((64, 64))}, jaxcomm.global_qsgd("dcn")

    def bytes_by_axis(stage: Any) -> Any:
        tx = jaxcomm.hierarchical(jaxcomm.mean("ici"), stage)
        rows = lambda p, b: jnp.sum(p["w"].reshape(-1) * b.mean(axis=0))  # noqa: E731
        step, state = prepared(rows, tx, params, MESH, axis_name=AXES)
        return jaxcomm.wire.account(step, params, state, jnp.zeros((8, 64 * 64))).bytes_by_axis

    whole, slices = map(bytes_by_axis, (coded, sliced(coded, axis_name="ici")))
    assert 0.24 < slices["dcn"] / whole["dcn"] < 0.26
    assert slices["ici"] == whole["ici"] + 64 * 64 * 4 * 3 / 4


def test_one_workers_nan_is_skipped_by_all() -> None:
    """The memory of every slice stays as it was, and the next step goes on."""
    tx = optax.chain(jaxcomm.skip_nonfinite(islands(OUTER), axis_name=AXES), optax.sgd(RATE))
    step, state = prepared(loss, tx, START, MESH, axis_name=AXES)
    params, state, _ = step(START, state, BATCHES[0])
    bad = BATCHES[1].copy()
    bad[5, 3] = np.nan
    kept, after, _ = step(params, state, bad)
    require_same((kept, after[0].inner), (params, state[0].inner))
    moved, _, _ = step(kept, after, BATCHES[1])
    assert np.isfinite(moved["w"]).all() and not np.array_equal(moved["w"], kept["w"])


@pytest.mark.parametrize("sizes", [(3, 2), (1, 1)])
def test_other_numbers_of_islands_and_bfloat16(sizes: tuple[int, int]) -> None:
    values = np.random.default_rng(2).normal(size=(*sizes, 7)).astype(jnp.bfloat16)
    one = averaged(islands(jaxcomm.mean("dcn")))
    nested = jax.vmap(jax.vmap(one, axis_name="ici"), axis_name="dcn")
    found = np.asarray(jax.jit(nested)(jnp.asarray(values)))
    assert found.dtype == jnp.bfloat16
    expected = np.broadcast_to(values.astype(np.float64).mean(axis=(0, 1)), found.shape)
    np.testing.assert_allclose(found.astype(np.float64), expected, atol=2**-7)


def test_updates_that_differ_are_refused() -> None:
    one, spec = averaged(sliced(jaxcomm.mean("dcn"), axis_name="ici")), PartitionSpec(AXES)
    differ = jax.shard_map(one, mesh=MESH, in_specs=spec, out_specs=spec)
    message = r"`sliced` takes .* differs by worker over \['ici'\]"
    refuse(message, lambda: differ(jnp.zeros(8)))


def test_its_own_axis_is_refused() -> None:
    message = "of `sliced` names"
    refuse(message, lambda: sliced(jaxcomm.mean("dcn"), axis_name="dcn"))
