"""Two equal methods in one program draw codes independently, and meet the same neighbors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcomm import compression, gossip
from tests.gossip.workers import start
from tests.slow import slow

RANDOM = compression.scaled(compression.sparsifiers.random_k(k=3))
DITHER = compression.quantizers.dither(levels=7)
PLAN = gossip.matcha_plan(gossip.ring(8), budget=0.5)
CODED = {
    "choco_random_k": lambda axis: gossip.choco_sgd(
        gossip.ring(8), RANDOM, step_size=0.3, axis_name=axis
    ),
    "choco_over_matcha": lambda axis: gossip.choco_sgd(PLAN, RANDOM, step_size=0.3, axis_name=axis),
    "deep_squeeze_dither": lambda axis: gossip.deep_squeeze(
        gossip.ring(8), DITHER, step_size=0.3, axis_name=axis
    ),
}
DRAWN = {
    "matcha": lambda axis: gossip.matcha(PLAN, axis_name=axis),
    "noloco": lambda axis: gossip.noloco(gossip.random_pairs(8), 1, axis_name=axis),
    "ad_psgd": lambda axis: gossip.ad_psgd(gossip.ring(8), axis_name=axis),
}


def changes(tx: optax.GradientTransformation, x: Any, axis: str = "data") -> Any:
    """Of 8 workers in three steps without updates, of which one may mix nothing."""

    def worker(x: Any) -> Any:
        state = tx.init(x)
        for _ in range(3):
            change, state = tx.update(jax.tree.map(jnp.zeros_like, x), state, x)
            x = optax.apply_updates(x, change)
        return x

    return jax.jit(jax.vmap(worker, axis_name=axis))(x)


def in_branches(make: Any) -> Any:
    tx = optax.partition(
        {"first": make("data"), "second": make("data")}, {"a": "first", "b": "second"}
    )
    return changes(tx, {"a": start(8), "b": start(8)})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["choco_random_k", *map(slow, [*CODED][1:])])
def test_codes_are_drawn_independently(name: str) -> None:
    make = CODED[name]
    both = in_branches(make)
    assert np.any(both["a"] != both["b"])
    data, other = (changes(make(axis), start(8), axis) for axis in ("data", "other"))
    assert np.any(data != other)
    np.testing.assert_array_equal(changes(make("data"), start(8)), data)  # Built again.


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_neighbors_are_drawn_equally(name: str) -> None:
    """So that parts of parameters are mixed as the whole is, and clocks need no leaves."""
    make = DRAWN[name]
    both, whole = in_branches(make), changes(make("data"), {"a": start(8), "b": start(8)})
    for each in both, whole:
        np.testing.assert_array_equal(each["a"], each["b"])
    np.testing.assert_array_equal(both["a"], whole["a"])
    assert np.any(whole["a"] != start(8))
