"""`jax.vmap` of a training step on a mesh, a population, equals its members one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from tests.cases import CASES, Case, rows
from tests.workers import mesh_of, towards

MEMBERS, WORKERS = 2, 2
QUICK = {"elias", "golomb_rice", "rans"}


@pytest.mark.parametrize("case", rows(CASES, QUICK), ids=repr)
def test_a_population_is_its_members(case: Case) -> None:
    rng = np.random.default_rng(0)
    params = jnp.asarray(rng.normal(size=(MEMBERS, 12, 4)), jnp.float32)
    targets = jnp.asarray(rng.normal(size=(WORKERS, 12, 4)), jnp.float32)
    mesh, tx = mesh_of(WORKERS), optax.chain(case.make(), optax.sgd(0.1))
    step = jaxcomm.make_step(towards, tx, mesh, donate=False)
    state = jaxcomm.init(tx, params[0], mesh)
    after = lambda member: step(member, state, targets)[0]  # noqa: E731
    population = jax.jit(jax.vmap(after))(params)
    one_by_one = jnp.stack([after(member) for member in params])
    np.testing.assert_allclose(population, one_by_one, rtol=0, atol=1e-5)
