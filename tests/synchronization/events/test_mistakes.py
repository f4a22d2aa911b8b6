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
from jaxcomm.synchronization import deterministic, events, shifted_exponential
from tests.synchronization.events.problem import halved, whole

SGD = optax.sgd(0.1)
pairs = events.asynchronous_pairs


def admm(**options: Any) -> Any:
    return events.d_admm(**{"graph": gossip.ring(4), "penalty": 1.0, **options})


def diloco(**options: Any) -> Any:
    return events.decoupled_diloco(SGD, SGD, **{"period": 2, "quorum": 2, **options})


MADE: list[tuple[Callable[[], Any], str]] = [
    (lambda: events.stale_synchronous(top_k(k=1), 1), "optimizer|optax"),
    (lambda: pairs(SGD, nx.DiGraph([(0, 1), (1, 0)])), "`graph` is directed"),
    (
        lambda: pairs(SGD, nx.Graph([(0, 1), (2, 3)])),
        "`graph` is not connected",
    ),
    (lambda: admm(penalty=0.0), "`penalty` must be a Python float above 0"),
    (lambda: admm(colors=[0, 1, 1, 2]), "`colors` must be different for neighbors"),
    (
        lambda: events.asy_lpg(whole, 0.1, 8, codec=error_feedback(top_k(k=1))),
        "`codec` has memory",
    ),
]


@pytest.mark.parametrize(("make", "message"), MADE, ids=[message for _, message in MADE])
def test_a_policy_with_a_mistake(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


STARTED: list[tuple[Callable[[], Any], str]] = [
    (lambda: events.backup_workers(SGD, 4), "`backups`=4 must be less than 4 workers"),
    (lambda: events.easgd(SGD, elasticity=0.3), "must be at most 0.25, 1 / n"),
    (
        lambda: pairs(SGD, gossip.ring(5)),
        "`graph` has 5 nodes, for 4 workers",
    ),
    (lambda: events.jacobi_admm(gossip.ring(5), 1.0), "`graph` has 5 nodes"),
    (lambda: events.lag_ps(0.1, [1.0]), "`smoothness` must have 4 numbers, got 1"),
    (lambda: events.asy_lpg(whole, 0.1, 3), "`steps`=3 must be at least the number of workers, 4"),
    (lambda: diloco(quorum=5), "`quorum`=5 is more than the number of workers, 4"),
    (lambda: diloco(tokens=[1.0]), "`tokens` must have 4 numbers, got 1"),
]


@pytest.mark.parametrize(("make", "message"), STARTED, ids=[message for _, message in STARTED])
def test_a_policy_for_another_number_of_workers(make: Callable[[], Any], message: str) -> None:
    loop = events.event_loop(make(), halved, shifted_exponential(1.0), workers=4)
    with pytest.raises(ValueError, match=message):
        loop.start(jnp.ones(2))


def test_an_engine_with_a_mistake() -> None:
    policy = events.bulk_synchronous(SGD)
    with pytest.raises(ValueError, match="times of 2 workers, for 4 workers"):
        events.event_loop(policy, halved, deterministic([1.0, 2.0]), workers=4)
