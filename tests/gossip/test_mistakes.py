"""Mistakes with gossip are one clear ValueError each."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import compression, gossip, synchronization
from jaxcomm.compression.feedback import error_feedback

TOP = compression.sparsifiers.top_k(k=3)
PLAN = gossip.matcha_plan(gossip.ring(8), budget=0.5)
RING = gossip.ring(4)
DPSGD = gossip.dpsgd(RING)
SUPPORT = compression.sketches.s2_sketch(density=1, sketch_ratio=0.5)
COARSE = compression.quantizers.dither(levels=1, norm="l2")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gossip.dpsgd(gossip.exponential(8)), "is directed"),
        (lambda: gossip.dpsgd(np.array([[0.5, 0.2], [0.5, 0.8]])), "needs symmetric weights"),
        (lambda: gossip.dpsgd(2 * np.eye(3)), "columns of a mixing matrix must add to 1"),
        (lambda: gossip.dpsgd(nx.Graph([(1, 2)])), "workers 0 to n - 1 as nodes"),
        (lambda: gossip.d2(gossip.to_mixing(gossip.ring(8), "uniform")), "use `gossip.lazy_mixing"),
        (lambda: gossip.choco_sgd(PLAN, TOP, step_size=1, per_neighbor=False), "in all steps"),
        (lambda: gossip.hypercube(6), r"A hypercube has 2\*\*k workers, got `workers`=6"),
    ],
)
def test_errors_at_construction(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (gossip.choco_sgd(RING, SUPPORT, step_size=0.5), "support shared by all workers"),
        (gossip.choco_sgd(RING, error_feedback(TOP), step_size=0.5), "without feedback"),
        (gossip.deep_squeeze(RING, COARSE, step_size=0.5), "a relative error below 1"),
        (optax.chain(DPSGD, optax.sgd(0.1)), "must be last in `optax.chain`"),
        (optax.partition({"a": optax.chain(DPSGD, optax.scale(2.0))}, "a"), "must be last"),
    ],
)
def test_errors_at_init(tx: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jaxcomm.init(tx, jaxcomm.replicate(jnp.ones(100), 4), 4)


def loss(x: jax.Array, batch: jax.Array) -> jax.Array:
    return jnp.sum(x**2) * jnp.mean(batch)


MOMENTUM = optax.chain(optax.sgd(0.1, momentum=0.9), DPSGD)


@pytest.mark.parametrize(
    ("tx", "replicated", "extra", "message"),
    [
        (DPSGD, False, {}, r"jaxcomm.replicate\(params, mesh\)"),
        (MOMENTUM, True, {}, r"\.trace.*per_worker"),
        (DPSGD, True, {"present": jnp.ones(3, bool)}, r"bool\[4\], got bool\[3\]"),
        (DPSGD, True, {"weight": jnp.ones(4)}, r"`weight` must be a scalar on each worker, got"),
    ],
)
def test_errors_in_a_step(tx: Any, replicated: bool, extra: Any, message: str) -> None:
    params = jaxcomm.replicate(jnp.ones(12), 4) if replicated else jnp.ones(12)
    step = jaxcomm.simulate(loss, tx, 4)
    with pytest.raises(ValueError, match=message):
        step(params, jaxcomm.init(tx, params, 4), jnp.ones(4), **extra)


def test_errors_in_an_update() -> None:
    def update(x: jax.Array) -> jax.Array:
        return DPSGD.update(x, DPSGD.init(x), x, weight=-1)[0]

    with pytest.raises(ValueError, match=r"`weight` must be 0 or from .*, got -1"):
        jax.vmap(update, axis_name="data")(jnp.ones((4, 3)))


@pytest.mark.parametrize("method", [DPSGD, synchronization.local_sgd(1)])
def test_presence_can_be_a_list(method: Any) -> None:
    tx = optax.chain(optax.sgd(0.1), method)
    found = []
    for present in ([True, False, True, True], jnp.array([True, False, True, True])):
        params = jaxcomm.replicate(jnp.ones(3), 4)
        step = jaxcomm.simulate(loss, tx, 4)
        found.append(step(params, jaxcomm.init(tx, params, 4), jnp.arange(4.0), present=present)[0])
    assert (found[0].per_worker["data"] == found[1].per_worker["data"]).all()
