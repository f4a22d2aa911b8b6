"""Leaves where they lie, and in stacks, on meshes of any kind; and what is sent of large ones."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxcomm
from jaxcomm import _units
from jaxcomm.aggregation import all_gather_mean, all_reduce_mean, two_stage_mean
from jaxcomm.compression import blockwise, scaled
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither, scaled_signs
from tests.slow import slow

ON_MESHES = {
    "shared_statistics": lambda: all_reduce_mean(error_feedback(scaled(dither(levels=2)))),
    "independent": lambda: two_stage_mean(error_feedback(blockwise(dither(levels=3), 4))),
    "stacked": lambda: two_stage_mean(error_feedback(scaled_signs())),
    "stacked and summed": lambda: all_reduce_mean(dither(bits=8), scope="leaf"),
}
SUM_INTEGERS = {
    "shared_statistics",
    "stacked and summed",
}  # The others add what float decoding rounded.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "kind"),
    [
        (8, AxisType.Explicit),
        *map(slow, (8, 1, 1), (AxisType.Auto, AxisType.Explicit, AxisType.Auto)),
    ],
)
@pytest.mark.parametrize("method", ON_MESHES)
def test_on_meshes_as_simulated(
    method: str, workers: int, kind: AxisType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 too; one worker's NaN is everybody's, and no memory's."""
    monkeypatch.setattr(_units, "LARGE", 32)
    tx = optax.chain(ON_MESHES[method](), optax.sgd(1.0))
    params = {
        "a": jnp.zeros(5),
        "b": jnp.zeros(5),
        "large": jnp.zeros((16, 4)),
        "larger": jnp.zeros((9, 8), jnp.bfloat16),
    }

    def loss(params: Any, rows: jax.Array) -> jax.Array:
        flat = [jnp.ravel(x).astype(jnp.float32) for x in jax.tree.leaves(params)]
        return rows[0] @ jnp.concatenate(flat)

    mesh = jax.make_mesh((workers,), ("data",), (kind,), devices=jax.devices()[:workers])
    batch = np.random.default_rng(0).standard_normal((workers, 146)).astype(np.float32)
    bad = batch.copy()
    bad[-1, 3] = np.nan
    of_mesh = jaxcomm.make_step(loss, tx, mesh, donate=False)
    simulated = jaxcomm.simulate(loss, tx, workers=workers, donate=False)
    here = params, jaxcomm.init(tx, params, mesh)
    there = params, jaxcomm.init(tx, params, workers)
    for _ in range(2):
        *here, _ = of_mesh(*here, batch)
        *there, _ = simulated(*there, batch)
    for one, other in zip(*map(jax.tree.leaves, (here[0], there[0])), strict=True):
        last_bits = 0.0 if method in SUM_INTEGERS else 4 * float(jnp.finfo(one.dtype).eps)
        np.testing.assert_allclose(
            *(np.asarray(x, np.float32) for x in (one, other)), rtol=last_bits, atol=last_bits
        )
    assert not np.array_equal(on_host(here[0])["large"], on_host(params)["large"])
    ruined, state, _ = of_mesh(*here, bad)
    assert all(np.isnan(x.astype(np.float32)).all() for x in jax.tree.leaves(on_host(ruined)))
    chex.assert_trees_all_equal(*(on_host(state[0].own) for state in (state, here[1])))


def on_host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


@pytest.mark.parametrize(("size", "words"), [(300 * 218, 65400 + 13), (300 * 300, 90112)])
def test_large_messages_are_whole_tiles(size: int, words: int) -> None:
    """Codes, then a norm and a flag of 4 bytes each: filled up from 2**16 on."""
    tx = all_gather_mean(dither(bits=8))
    params = {"a": jnp.zeros(5), "large": jnp.zeros((300, size // 300))}
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])

    def loss(params: Any, row: jax.Array) -> jax.Array:
        return sum(jnp.sum(x) for x in jax.tree.leaves(params)) * row[0]

    step = jaxcomm.make_step(loss, optax.chain(tx, optax.sgd(1.0)), mesh)
    state = jaxcomm.init(optax.chain(tx, optax.sgd(1.0)), params, mesh)
    sent = jaxcomm.wire.account(step, params, state, jnp.ones(4)).bytes_per_worker
    assert sent == 3 * words + 2 * 3 / 4 * 4  # And the loss.
