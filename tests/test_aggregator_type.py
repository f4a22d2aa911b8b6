"""The type of an aggregator is found through every combinator, and by a step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

import jaxcomm
from jaxcomm import Aggregator, gossip
from jaxcomm._contract import reports
from jaxcomm.scheduling import wait_free
from jaxcomm.synchronization import local_sgd
from tests.aggregation.runs import prepared

N = 2
PARAMS = {"w": jnp.ones(3), "b": jnp.zeros(())}
OF_KINDS: dict[str, Any] = {
    "mean": lambda: jaxcomm.hierarchical(jaxcomm.mean("data")),
    "gossip": lambda: gossip.dpsgd(gossip.ring(N)),
    "local": lambda: local_sgd(2),
    "loss": lambda: jaxcomm.zeroth_order(),
    "backward": lambda: wait_free(jaxcomm.global_qsgd()),
}
COMBINATORS: dict[str, Any] = {
    "chain": lambda tx: optax.chain(optax.identity(), tx),
    "named_chain": lambda tx: optax.named_chain(("first", optax.identity()), ("second", tx)),
    "masked": lambda tx: optax.masked(tx, True),
    "partition": lambda tx: optax.partition({"all": tx}, "all"),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(lambda rate: tx)(rate=0.1),
    "extra arguments": optax.with_extra_args_support,
    "per_worker": jaxcomm.per_worker,
}


def found(tx: Any) -> list[Aggregator]:
    """The aggregators that report themselves to workers that initialize their state."""
    aggregators: list[Aggregator] = []

    def init(params: Any) -> None:
        with reports() as those:
            tx.init(params)
        aggregators.extend(each for each, _ in those)

    jax.eval_shape(
        lambda params: jax.vmap(init, axis_name="data", axis_size=N, in_axes=None)(params), PARAMS
    )
    return aggregators


@pytest.mark.parametrize("kind", OF_KINDS)
def test_aggregators_report_kind_and_axes(kind: str) -> None:
    tx = OF_KINDS[kind]()
    assert (tx.kind, tx.axes) == (kind, ("data",))
    other = tx._replace(init=lambda params: ())
    assert isinstance(other, Aggregator) and (other.kind, other.parts) == (kind, tx.parts)
    assert other.init(PARAMS) == () and other.update is tx.update


@pytest.mark.parametrize("kind", OF_KINDS)
@pytest.mark.parametrize("combinator", COMBINATORS)
def test_aggregators_are_found_through_combinators(combinator: str, kind: str) -> None:
    tx = OF_KINDS[kind]()
    assert tx in found(COMBINATORS[combinator](tx))
    assert not found(COMBINATORS[combinator](optax.adam(0.1)))


@pytest.mark.parametrize("kind", ["loss", "backward"])
def test_a_step_finds_it_whatever_rebuilt_the_state(kind: str) -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((x * jnp.sum(params["w"]) + params["b"] - 1) ** 2)

    tx = optax.chain(OF_KINDS[kind](), optax.scale(-0.1))
    step, state = prepared(loss, tx, PARAMS, N)
    x = jnp.arange(4.0)
    expected, *_ = step(PARAMS, state, x)
    by_flax = serialization.from_state_dict(state, serialization.to_state_dict(state))
    by_jax = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(state))
    for rebuilt in (by_flax, by_jax):
        after, *_ = step(PARAMS, rebuilt, x)
        jax.tree.map(np.testing.assert_array_equal, after, expected)


def test_a_step_checks_again_when_retraced() -> None:
    """JAX keeps what it traced, and a kept trace of `init` reports nothing."""
    tx = optax.chain(jaxcomm.zeroth_order(2), optax.sgd(0.1))
    flat = lambda w, x: jax.lax.stop_gradient(jnp.sum(w)) * jnp.mean(x)  # noqa: E731
    params = jnp.ones(3)
    step, state = prepared(flat, tx, params, 2)
    for rows in (2, 4, 6):
        moved, *_ = step(params, state, jnp.ones(rows))
        assert jnp.any(moved != params)
