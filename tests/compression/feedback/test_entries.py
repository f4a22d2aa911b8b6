"""What feedback keeps of a codec that decodes to few values among zeros, touched there alone."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxcomm
from jaxcomm import Context
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.feedback._loop import feedback_loop
from jaxcomm.compression.sparsifiers import _largest, top_k

X = jnp.asarray(np.random.default_rng(0).standard_normal((9, 7)), jnp.float32)


def kept_after(codec: jaxcomm.Codec, steps: int = 3) -> Any:
    memory = codec.init(X)
    for _ in range(steps):
        _, memory = codec.encode(Context.of(X, memory=memory), X)
    return memory.own.kept


def loop(*, elementwise: bool, updated: Any) -> jaxcomm.Codec:
    return feedback_loop(
        top_k(k=5),
        initial=jnp.zeros_like,
        corrected=jnp.add,
        updated=updated,
        elementwise=elementwise,
    )


@pytest.mark.slow
def test_entries_update_the_residual_like_the_whole_array() -> None:
    dense, sparse = (
        kept_after(loop(elementwise=each, updated=lambda kept, x, sent: kept + x - sent))
        for each in (False, True)
    )
    np.testing.assert_array_equal(sparse, dense)


@pytest.mark.slow
def test_dependent_coordinates_are_not_updated_separately() -> None:
    codec = loop(elementwise=False, updated=lambda kept, x, sent: x - jnp.sum(sent))
    flat = np.asarray(X).ravel()
    largest = np.sort(flat[np.argsort(-np.abs(flat))[:5]])
    np.testing.assert_allclose(kept_after(codec, 1), X - largest.sum(), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "kind"), [(8, AxisType.Explicit), (1, AxisType.Auto)])
def test_a_threshold_on_meshes(
    workers: int, kind: AxisType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a sort, in units that are large enough, with a bfloat16 leaf; a NaN leaves memory."""
    params = {"a": jnp.zeros((300, 230)), "b": jnp.zeros(7, jnp.bfloat16)}
    tx = optax.chain(jaxcomm.all_gather_mean(error_feedback(top_k(ratio=0.01))), optax.sgd(1.0))
    mesh = jax.make_mesh((workers,), ("data",), (kind,), devices=jax.devices()[:workers])
    batch = np.random.default_rng(0).standard_normal((workers, 69007)).astype(np.float32)
    bad = batch.copy()
    bad[-1, 3] = np.nan

    def loss(params: Any, row: jax.Array) -> jax.Array:
        leaves = [jnp.ravel(x).astype(jnp.float32) for x in jax.tree.leaves(params)]
        return row[0] @ jnp.concatenate(leaves)

    def two_steps() -> Any:
        step = jaxcomm.make_step(loss, tx, mesh, donate=False)
        state = params, jaxcomm.init(tx, params, mesh)
        for _ in range(2):
            *state, _ = step(*state, batch)
        ruined, after, _ = step(*state, bad)
        assert all(np.isnan(x).all() for x in jax.tree.leaves(ruined))
        chex.assert_trees_all_equal(after[0].own, state[1][0].own)
        return jax.tree.map(np.asarray, (state[0], state[1][0].own))

    sorted_out = two_steps()
    monkeypatch.setattr(_largest, "by_sort", _largest.by_threshold)
    chex.assert_trees_all_equal(two_steps(), sorted_out)
