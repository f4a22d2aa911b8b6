"""Frozen leaves: only what is trained is sent."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm.compression.quantizers import dither
from jaxcomm.wire._account import Account
from tests.aggregation.runs import prepared, refuse
from tests.workers import mesh_of

AGGREGATORS: dict[str, Any] = {
    "mean": jaxcomm.mean,
    "global_qsgd": lambda: jaxcomm.global_qsgd(bits=8),
    "top_k": lambda: jaxcomm.top_k_sgd(ratio=0.1),
    "two_stage": lambda: jaxcomm.two_stage_mean(dither(bits=8)),
}
BASE = {"kernel": np.ones((30, 7), np.float32), "bias": np.ones(7, np.float32)}
ADAPTER = {"a": np.ones((30, 2), np.float32), "b": np.zeros((2, 7), np.float32)}
PARAMS = {"adapter": ADAPTER, "base": BASE}
LABELS = {"adapter": "trained", "base": "frozen"}
TRAINED = {"adapter": True, "base": False}
ELSE = {"adapter": False, "base": True}
FROZEN = optax.stateless(lambda grads, params: optax.tree.zeros_like(params))


def loss(params: Any, x: jax.Array) -> jax.Array:
    base, adapter = params["base"], params["adapter"]
    y = x @ base["kernel"] + base["bias"][None] + x @ adapter["a"] @ adapter["b"]
    return jnp.mean((y - jnp.sin(x[:, :7])) ** 2)


def chain(name: str) -> Any:
    return optax.chain(AGGREGATORS[name](), optax.sgd(0.1, momentum=0.9))


FORMS = {
    "partition": lambda tx: optax.partition({"trained": tx, "frozen": FROZEN}, LABELS),
    "masked": lambda tx: optax.chain(optax.masked(tx, TRAINED), optax.masked(FROZEN, ELSE)),
}


def trained(loss: Any, tx: Any, params: Any) -> tuple[Any, Account]:
    """The parameters after two steps of 8 workers, and the account."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((16, 30)), jnp.float32)
    step, state = prepared(loss, tx, params, mesh_of(8))
    account = jaxcomm.wire.account(step, params, state, x)
    for _ in range(2):
        params, state, _ = step(params, state, x)
    jax.tree.map(np.testing.assert_array_equal, params.get("base", BASE), BASE)
    return params, account


@pytest.mark.slow
@pytest.mark.parametrize("name", AGGREGATORS)
def test_frozen_leaves_are_not_sent(name: str) -> None:
    """As if the base were no parameter, but a constant of the loss."""
    of_adapter = lambda adapter, x: loss({"adapter": adapter, "base": BASE}, x)  # noqa: E731
    alone, expected = trained(of_adapter, chain(name), ADAPTER)
    for freezing in FORMS.values():
        params, account = trained(loss, freezing(chain(name)), PARAMS)
        assert account.bytes_by_axis == expected.bytes_by_axis
        assert np.any(params["adapter"]["b"] != 0)
        if name not in ("global_qsgd", "two_stage"):  # PRNG keys depend on the paths of leaves.
            chex.assert_trees_all_close(params["adapter"], alone, rtol=1e-5)


def test_unused_means_are_removed() -> None:
    """By XLA, and the account does not count it."""
    tx = optax.chain(jaxcomm.mean(), FORMS["partition"](optax.sgd(0.1, momentum=0.9)))
    _, account = trained(loss, tx, PARAMS)
    assert account.bytes_per_worker == 2 * 7 / 8 * 4 * (60 + 14 + 1)


@pytest.mark.parametrize(
    "tx",
    [
        optax.partition({"trained": chain("mean"), "frozen": optax.set_to_zero()}, LABELS),
        optax.masked(chain("mean"), TRAINED),
    ],
    ids=["set_to_zero", "masked"],
)
def test_frozen_leaves_with_gradients_are_refused(tx: Any) -> None:
    """`optax.masked` alone would apply each worker's own gradient."""
    message = r"\['base'\]\['bias'\] differs .* A frozen leaf needs `optax.stateless"
    refuse(message, lambda: trained(loss, tx, PARAMS))
