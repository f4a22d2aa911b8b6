"""ADMM on graphs: the duals add to 0, and the workers agree on the optimum of the sum."""

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest

from jaxcomm import gossip
from jaxcomm.synchronization import events, shifted_exponential
from jaxcomm.synchronization.events import Event, Policy, Subproblem
from tests.slow import slow

CURVATURE = np.random.default_rng(3).uniform(0.5, 2.0, (8, 5))
MINIMUM = np.random.default_rng(4).normal(size=(8, 5))
OPTIMUM = (CURVATURE * MINIMUM).sum(axis=0) / CURVATURE.sum(axis=0)


def solve(point: Subproblem, event: Event) -> tuple[jax.Array, jax.Array]:
    curvature, minimum = jnp.asarray(CURVATURE)[event.worker], jnp.asarray(MINIMUM)[event.worker]
    x = (curvature * minimum - point.linear) / (curvature + point.curvature)
    return jnp.float32(0), x


@pytest.mark.parametrize(
    "policy",
    [
        events.d_admm(gossip.ring(8), 0.7),
        slow(events.d_admm(nx.wheel_graph(8), 0.3)),
        slow(events.jacobi_admm(nx.path_graph(8), 0.5)),
    ],
)
def test_quadratics_reach_the_optimum_of_their_sum(policy: Policy) -> None:
    with jax.enable_x64(True):
        loop = events.event_loop(policy, solve, shifted_exponential(1.0), workers=8)
        progress, _ = jax.jit(loop.run, static_argnums=1)(loop.start(jnp.zeros(5)), 8 * 800)
        state = progress.policy
        latest = np.asarray(state.params)[np.arange(8), np.asarray(state.solved) % 2]
        np.testing.assert_allclose(latest, np.tile(OPTIMUM, (8, 1)), atol=1e-8)
        np.testing.assert_allclose(np.asarray(state.dual).sum(axis=0), 0, atol=1e-12)
        assert np.abs(np.asarray(state.dual)).max() > 0.01
