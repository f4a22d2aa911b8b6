"""Replicas, state and graphs of another number of workers than there are: an error, never half."""

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
ways = pytest.mark.parametrize(("make", "laid_out"), WAYS, ids=["simulate", "mesh"])
rows = pytest.mark.parametrize("case", gossip_rows(4), ids=repr)


def loss(x: jax.Array, batch: jax.Array) -> jax.Array:
    return jnp.sum(x) * jnp.mean(batch)


def replicas(workers: int) -> jaxcomm.PerWorker:
    return jaxcomm.PerWorker({"data": jnp.asarray(start(workers))})


def step_of_four(case: GossipCase, make: Any, laid_out: Any) -> Any:
    return make(loss, optax.chain(optax.identity(), case.make(4)), laid_out(4))


@ways
@rows
def test_of_8_where_there_are_4(case: GossipCase, make: Any, laid_out: Any) -> None:
    step = step_of_four(case, make, laid_out)
    state = optax.EmptyState(), initial(case.make(4), start(4))
    message = "is for 8 workers, but there are 4"
    with pytest.raises(ValueError, match=f"The parameters.*{message}"):
        step(replicas(8), state, jnp.zeros(4))
    other = jax.eval_shape(lambda: (optax.EmptyState(), initial(case.make(8), start(8))))
    other = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), other)
    with pytest.raises(ValueError, match=f"The .*state.*{message}"):
        step(replicas(4), other, jnp.zeros(4))


@ways
@rows
def test_a_graph_of_8_where_there_are_4(case: GossipCase, make: Any, laid_out: Any) -> None:
    message = "The graph has 8 nodes, for 4 workers"
    with pytest.raises(ValueError, match=message):
        jaxcomm.init(case.make(8), replicas(4), laid_out(4))
    state = initial(case.make(4), start(4))
    with pytest.raises(ValueError, match=message):
        make(loss, case.make(8), laid_out(4))(replicas(4), state, jnp.zeros(4))
