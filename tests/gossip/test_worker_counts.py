"""Replicas and graphs of another number of workers than there are: an error, never half."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxcomm
from tests.cases._gossip import GossipCase, gossip_rows
from tests.gossip.workers import initial, start
from tests.workers import mesh_of

WAYS = [(jaxcomm.simulate, lambda workers: workers), (jaxcomm.make_step, mesh_of)]


@pytest.mark.parametrize(("make", "laid_out"), WAYS, ids=["simulate", "mesh"])
@pytest.mark.parametrize("case", gossip_rows(4), ids=repr)
def test_state_of_8_workers_on_4_is_refused(case: GossipCase, make: Any, laid_out: Any) -> None:
    def loss(x: jax.Array, batch: jax.Array) -> jax.Array:
        return jnp.sum(x) * jnp.mean(batch)

    eight, four = (jaxcomm.PerWorker({"data": jnp.asarray(start(n))}) for n in (8, 4))
    step = make(loss, optax.chain(optax.identity(), case.make(4)), laid_out(4))
    state, batch = initial(case.make(4), start(4)), jnp.zeros(4)
    with pytest.raises(ValueError, match=r"The parameters.*is for 8 workers, but there are 4"):
        step(eight, (optax.EmptyState(), state), batch)
    message = "The graph has 8 nodes, for 4 workers"
    with pytest.raises(ValueError, match=message):
        jaxcomm.init(case.make(8), four, laid_out(4))
    with pytest.raises(ValueError, match=message):
        make(loss, case.make(8), laid_out(4))(four, state, batch)
