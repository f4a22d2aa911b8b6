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
DPSGD = gossip.dpsgd(gossip.ring(4))
SUPPORT = compression.sketches.s2_sketch(density=1, sketch_ratio=0.5)
APART = nx.Graph([(0, 1), (2, 3)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gossip.dpsgd(gossip.exponential(8)), "is directed"),
        (lambda: gossip.dpsgd(np.array([[0.5, 0.2], [0.5, 0.8]])), "needs symmetric weights"),
        (lambda: gossip.d2(np.array([[0.5, 0.2], [0.5, 0.8]])), "needs symmetric weights"),
        (lambda: gossip.ad_psgd(gossip.exponential(8)), "`graph` is directed"),
        (lambda: gossip.dpsgd(2 * np.eye(3)), "columns of a mixing matrix must add to 1"),
        (lambda: gossip.dpsgd(3), "A mixing must be a networkx graph"),
        (lambda: gossip.dpsgd([gossip.ring(3), gossip.ring(4)]), "must have the same shape"),
        (lambda: gossip.dpsgd(APART), "is not connected"),
        (
            lambda: gossip.dpsgd(nx.relabel_nodes(gossip.ring(3), {0: 7})),
            "workers 0 to n - 1 as nodes",
        ),
        (lambda: gossip.matcha(gossip.ring(8)), "must be a plan of `gossip.matcha_plan`"),
        (lambda: gossip.d2(gossip.to_mixing(gossip.ring(8), "uniform")), "use `gossip.lazy_mixing"),
        (lambda: gossip.d2(PLAN), "the same in all steps"),
        (lambda: gossip.choco_sgd(PLAN, TOP, step_size=1, per_neighbor=False), "in all steps"),
        (
            lambda: gossip.choco_sgd(gossip.ring(8), compression.sparsifiers.top_k, step_size=1),
            r"`codec` must be a codec, .* got the function `top_k`: call it",
        ),
        (lambda: gossip.deep_squeeze(gossip.ring(8), 0.1, step_size=1), "must be a codec"),
        (lambda: gossip.ad_psgd(gossip.ring(8), staleness=1.5), "`staleness` must be a Python"),
        (lambda: gossip.noloco(gossip.exponential(8)), "is directed"),
        (lambda: gossip.periodic_averaging(3, optax.sgd(0.1)), "`gossip` must be a method of"),
        (lambda: gossip.periodic_averaging(3, optax.chain(DPSGD)), "`gossip` must be a method of"),
        (lambda: gossip.periodic_averaging(3, gossip.ring(4)), "`gossip` must be an optax"),
        (lambda: gossip.one_peer_exponential(6, directed=False), r"needs 2\*\*k workers"),
        (lambda: jaxcomm.replicate(jnp.ones(3), 0), "number of workers must be an int"),
        (lambda: gossip.dpsgd(gossip.ring(8)).init(jnp.ones(3)), "is not bound here"),
    ],
)
def test_said_when_it_is_built(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def loss(x: jax.Array, batch: jax.Array) -> jax.Array:
    return jnp.sum(x**2) * jnp.mean(batch)


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (gossip.dpsgd(gossip.ring(3)), "The graph has 3 nodes, for 4 workers"),
        (gossip.choco_sgd(gossip.ring(4), SUPPORT, step_size=0.5), "support shared by all workers"),
        (gossip.choco_sgd(gossip.ring(4), error_feedback(TOP), step_size=0.5), "without feedback"),
        (gossip.deep_squeeze(gossip.ring(4), compression.quantizers.dither(levels=1, norm="l2"),
                             step_size=0.5), "a relative error below 1"),
        (optax.chain(DPSGD, optax.sgd(0.1)), "must be last in `optax.chain`"),
        (optax.chain(optax.chain(optax.sgd(0.1), DPSGD), optax.scale(2.0)), "must be last"),
        (jaxcomm.skip_nonfinite(optax.chain(gossip.periodic_averaging(2, DPSGD), optax.scale(-1))),
         "must be last"),
        (optax.chain(optax.masked(DPSGD, True), optax.scale(2.0)), "must be last"),
        (optax.named_chain(("gossip", DPSGD), ("after", optax.scale(2.0))), "must be last"),
        (optax.partition({"a": optax.chain(DPSGD, optax.scale(2.0))}, "a"), "must be last"),
    ],
)  # fmt: skip
def test_said_when_state_is_made(tx: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jaxcomm.init(tx, jaxcomm.replicate(jnp.ones(100), 4), 4)


@pytest.mark.parametrize(
    ("tx", "replicated", "extra", "message"),
    [
        (DPSGD, False, {}, r"jaxcomm.replicate\(params, mesh\)"),
        (optax.chain(optax.sgd(0.1, momentum=0.9), DPSGD), True, {}, r"\.trace.*per_worker"),
        (DPSGD, True, {"present": jnp.ones(3, bool)}, r"bool\[4\], got bool\[3\]"),
        (DPSGD, True, {"present": jnp.ones(4)}, r"per worker, bool\[4\], got float32\[4\]"),
        (DPSGD, True, {"weight": jnp.ones(4)}, r"`weight` must be a scalar on each worker, got"),
        (DPSGD, True, {"exact": jnp.ones(4)}, r"`exact` must be one bool for all workers, got"),
        (gossip.choco_sgd(gossip.ring(4), TOP, step_size=0.5), True, {"present": jnp.ones(4, bool)},
         "per_neighbor=True"),
        (gossip.periodic_averaging(2, DPSGD), False, {}, r"jaxcomm.replicate\(params, mesh\)"),
    ],
)  # fmt: skip
def test_said_in_a_step(tx: Any, replicated: bool, extra: Any, message: str) -> None:
    params = jnp.ones(12)
    if replicated:
        params = jaxcomm.replicate(params, 4)
    step = jaxcomm.simulate(loss, tx, 4)
    with pytest.raises(ValueError, match=message):
        step(params, jaxcomm.init(tx, params, 4), jnp.ones(4), **extra)


@pytest.mark.parametrize(
    ("given", "extra", "message"),
    [
        (False, {}, r"tx.update\(updates, state, params\)"),
        (True, {"weight": -1}, r"`weight` must be 0 or from .*, got -1"),
        (True, {"weight": np.float32(np.nan)}, "`weight` must be 0 or from"),
    ],
)
def test_said_in_an_update(given: bool, extra: Any, message: str) -> None:
    def update(x: jax.Array) -> jax.Array:
        return DPSGD.update(x, DPSGD.init(x), x if given else None, **extra)[0]

    with pytest.raises(ValueError, match=message):
        jax.vmap(update, axis_name="data")(jnp.ones((4, 3)))


@pytest.mark.parametrize("method", [DPSGD, synchronization.local_sgd(1)])
def test_a_list_says_who_is_present(method: Any) -> None:
    tx = optax.chain(optax.sgd(0.1), method)
    found = []
    for present in ([True, False, True, True], jnp.array([True, False, True, True])):
        params = jaxcomm.replicate(jnp.ones(3), 4)
        step = jaxcomm.simulate(loss, tx, 4)
        found.append(step(params, jaxcomm.init(tx, params, 4), jnp.arange(4.0), present=present)[0])
    assert (found[0].per_worker["data"] == found[1].per_worker["data"]).all()
