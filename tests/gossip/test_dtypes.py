"""Gossip of float64 parameters is computed in float64; what parameters of 16 bits can reach."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import gossip
from tests.cases._gossip import GossipCase, gossip_rows
from tests.gossip.workers import matrices_of, start, steps, trajectory
from tests.slow import slow

FEW, MANY = 12, 300


@pytest.mark.parametrize("case", gossip_rows(8), ids=repr)
def test_float64_is_mixed_in_float64(case: GossipCase) -> None:
    x, updates = start(8).astype(np.float64), steps(FEW, 8).astype(np.float64)
    x, updates = x + 1e-9, updates + 1e-9  # Of digits that float32 has not.
    with jax.enable_x64(True):
        found, _ = trajectory(case.make(8), x, updates)
        expected = case.oracle(x, updates, matrices_of(case.mixing(8), FEW))
    np.testing.assert_allclose(found, expected, rtol=0, atol=case.double)


@pytest.mark.parametrize("case", gossip_rows(8), ids=repr)
def test_float32_stays_float32_where_float64_is_possible(case: GossipCase) -> None:
    exact = gossip.periodic_averaging(3, case.make(8))
    x, updates = start(8), steps(4, 8)
    with jax.enable_x64(True):
        found, state = trajectory(exact, x, updates)
    assert all(leaf.dtype != jnp.float64 for leaf in jax.tree.leaves(state))
    np.testing.assert_array_equal(found, trajectory(exact, x, updates)[0])


@pytest.mark.parametrize(
    "case",
    # The others' codecs have a floor far above that of rounding.
    [case for case in gossip_rows(8) if case.floor is not None],
    ids=repr,
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, slow(jnp.float16)])
def test_accuracy_of_16_bit_parameters(case: GossipCase, dtype: jax.typing.DTypeLike) -> None:
    """A few units in the last place, in which neighbors differ by too little to be mixed."""
    x = jnp.asarray(start(8) + 4, dtype)  # About one exponent, so that units are equal.
    found, _ = trajectory(case.make(8), x, jnp.zeros((MANY, 8, 12), dtype))
    first = np.asarray(x, np.float64)
    unit = float(jnp.finfo(dtype).eps) * 4
    assert np.ptp(found[-1], axis=0).max() <= case.floor * unit
    moves = np.count_nonzero(np.any(np.diff(found, axis=0), axis=(1, 2))) + 1
    # Half a unit a step at most; a tenth of one in fact, since it is rounded up as well as down.
    drift = np.abs(found[-1].mean(axis=0) - first.mean(axis=0)).max()
    assert drift <= (1 + 0.1 * moves) * unit


def test_leaves_of_several_dtypes_are_mixed_in_the_widest() -> None:
    """And keep their own; what is sent holds all of them exactly."""
    w = gossip.mixing_matrix(gossip.ring(8))
    tx = gossip.dpsgd(gossip.ring(8))

    def one(x: dict[str, jax.Array]) -> dict[str, jax.Array]:
        change, _ = tx.update(jax.tree.map(jnp.zeros_like, x), tx.init(x), x)
        return optax.apply_updates(x, change)

    with jax.enable_x64(True):
        rows = start(8).astype(np.float64) + 1e-9
        given = {"half": jnp.asarray(rows, jnp.bfloat16), "double": jnp.asarray(rows)}
        found = jax.jit(jax.vmap(one, axis_name="data"))(given)
    assert [found[k].dtype for k in given] == [jnp.bfloat16, jnp.float64]
    np.testing.assert_allclose(found["double"], w @ rows, rtol=0, atol=1e-14)
    half = w @ np.asarray(given["half"], np.float64)
    np.testing.assert_allclose(np.asarray(found["half"], np.float64), half, atol=0.02)


def test_consensus_is_that_of_the_dtype() -> None:
    with jax.enable_x64(True):
        x = jaxcomm.PerWorker({"data": jnp.asarray(start(8).astype(np.float64) + 1e-9)})
        found = jaxcomm.consensus(x)
    np.testing.assert_allclose(found, (start(8) + np.float64(1e-9)).mean(0), rtol=0, atol=1e-15)
