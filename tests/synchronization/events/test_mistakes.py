"""Mistakes are errors that state the condition."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import networkx as nx
import optax
import pytest

from jaxcomm import gossip
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import top_k
from jaxcomm.synchronization import events, shifted_exponential
from tests.synchronization.events.problem import halved, whole

SGD = optax.sgd(0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: events.asynchronous_pairs(SGD, nx.Graph([(0, 1), (2, 3)])),
            "`graph` is not connected",
        ),
        (
            lambda: events.asynchronous_pairs(SGD, gossip.ring(5)),
            "`graph` has 5 nodes, for 4 workers",
        ),
        (lambda: events.d_admm(gossip.ring(4), 1.0, [0, 1, 1, 2]), "`colors` must be different"),
        (
            lambda: events.asy_lpg(whole, 0.1, 8, codec=error_feedback(top_k(k=1))),
            "`codec` has memory",
        ),
        (lambda: events.asy_lpg(whole, 0.1, 3), "`steps`=3 must be at least the number of work"),
        (lambda: events.backup_workers(SGD, 4), "`backups`=4 must be less than 4 workers"),
        (lambda: events.easgd(SGD, elasticity=0.3), "must be at most 0.25, 1 / n"),
        (lambda: events.lag_ps(0.1, [1.0]), "`smoothness` must have 4 numbers, got 1"),
        (
            lambda: events.decoupled_diloco(SGD, SGD, period=2, quorum=5),
            "`quorum`=5 is more than the number of workers, 4",
        ),
    ],
)
def test_a_policy_with_a_mistake(make: Callable[[], Any], message: str) -> None:
    """When it is made, or started with 4 workers."""
    with pytest.raises(ValueError, match=message):
        loop = events.event_loop(make(), halved, shifted_exponential(1.0), workers=4)
        loop.start(jnp.ones(2))
