"""`jax.vmap` of a training step on a mesh, a population, equals its members one by one."""

import chex
import jax
import jax.numpy as jnp
import pytest

import jaxcomm
from tests.cases import CASES, Case
from tests.laws.steps import scheduled, start_and_targets
from tests.workers import mesh_of

MEMBERS, WORKERS = 2, 2


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_a_population_equals_its_members(case: Case) -> None:
    tx, step = scheduled(case)
    params, targets = start_and_targets()
    state = jaxcomm.init(tx, params, mesh_of(WORKERS))
    after = lambda member: step(member, state, targets)[0]  # noqa: E731
    members = [jax.tree.map(lambda x, i=i: x * (1 + i), params) for i in range(MEMBERS)]
    stack = lambda trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)  # noqa: E731
    population = jax.jit(jax.vmap(after))(stack(members))
    chex.assert_trees_all_close(population, stack([after(x) for x in members]), rtol=0, atol=1e-5)
