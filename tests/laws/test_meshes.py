"""A step is the simulated one on axes of either type, of one device and of eight."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType

import jaxcomm
from tests.cases import CASES, FEW, Case, rows
from tests.workers import gradients, of_one_worker


def _given(loss_fn: Any, params: Any, batch: Any) -> tuple[jax.Array, Any]:
    """Each worker's gradient is its part of the batch."""
    del loss_fn, params
    return jnp.zeros(()), of_one_worker(batch)


def one_step(case: Case, where: Any, batch: Any) -> Any:
    tx, params = optax.chain(case.make(), optax.sgd(0.1)), of_one_worker(gradients(1, seed=1))
    make = jaxcomm.simulate if isinstance(where, int) else jaxcomm.make_step
    step = make(lambda params, batch: jnp.zeros(()), tx, where, gradients=_given, donate=False)
    params, state, _ = step(params, jaxcomm.init(tx, params, where), batch)
    numbers = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.number)]
    return params, numbers


@pytest.mark.quick(2)
@pytest.mark.parametrize("workers", [1, 8])
@pytest.mark.parametrize("case", rows(CASES, FEW), ids=repr)
def test_one_step_on_any_mesh(case: Case, workers: int) -> None:
    batch = gradients(workers)
    expected = one_step(case, workers, batch)
    for kind in (AxisType.Auto, AxisType.Explicit):
        devices = jax.devices()[:workers]
        mesh = jax.make_mesh((workers,), ("data",), axis_types=(kind,), devices=devices)
        chex.assert_trees_all_close(one_step(case, mesh, batch), expected, rtol=1e-5, atol=1e-6)
