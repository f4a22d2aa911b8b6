"""A step is the same on axes of either type, of one device and of eight, and simulated."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest

import jaxcomm
from tests.cases import CASES, Case
from tests.laws.steps import given_gradients, meshes
from tests.workers import gradients, of_one_worker


def one_step(case: Case, where: Any, batch: Any) -> Any:
    tx, step = given_gradients(case, where)
    params = of_one_worker(gradients(1, seed=1))
    params, state, _ = step(params, jaxcomm.init(tx, params, where), batch)
    return params, [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.number)]


@pytest.mark.parametrize("workers", [1, 8])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_one_step_on_any_mesh(case: Case, workers: int) -> None:
    batch = gradients(workers)
    places = [*meshes(workers), *([workers] if workers > 1 else [])]
    expected, *others = (one_step(case, where, batch) for where in places)
    for found in others:
        chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)
