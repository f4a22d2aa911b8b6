"""ADMM on graphs: the duals add to 0, and the workers agree on the optimum of the sum."""

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest

from jaxcomm import gossip
from jaxcomm.synchronization import events, shifted_exponential
from jaxcomm.synchronization.events import Policy
from tests.slow import slow
from tests.synchronization.events.problem import CURVATURE, MINIMUM, SIZE, WORKERS, solve, vector

OPTIMUM = (CURVATURE * MINIMUM).sum(axis=0) / CURVATURE.sum(axis=0)


@pytest.mark.parametrize(
    "policy",
    [
        events.d_admm(gossip.ring(WORKERS), 0.7),
        slow(events.d_admm(nx.wheel_graph(WORKERS), 0.3)),
        slow(events.jacobi_admm(nx.path_graph(WORKERS), 0.5)),
    ],
)
def test_quadratics_reach_the_optimum_of_their_sum(policy: Policy) -> None:
    with jax.enable_x64(True):
        loop = events.event_loop(policy, solve, shifted_exponential(1.0), workers=WORKERS)
        start = loop.start({"a": jnp.zeros(4), "b": jnp.zeros((1, 2))})
        state = jax.jit(loop.run, static_argnums=1)(start, WORKERS * 800)[0].policy
        rows = np.arange(WORKERS), np.asarray(state.solved) % 2
        latest = vector(jax.tree.map(lambda x: np.asarray(x)[rows], state.params))
        np.testing.assert_allclose(latest, np.tile(OPTIMUM, (WORKERS, 1)), atol=1e-8)
        dual = vector(state.dual)
        np.testing.assert_allclose(dual.sum(axis=0), np.zeros(SIZE), atol=1e-12)
        assert np.abs(dual).max() > 0.01
