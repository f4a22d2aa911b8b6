"""Frozen leaves: only what is trained is sent."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxcomm
from jaxcomm.compression.quantizers import dither
from jaxcomm.wire._account import Account
from tests.laws.test_wire import compiled, compiled_collectives
from tests.slow import slow

AGGREGATORS: dict[str, Callable[[], Any]] = {
    "mean": jaxcomm.mean,
    "global_qsgd": lambda: jaxcomm.global_qsgd(bits=8),
    "top_k": lambda: jaxcomm.top_k_sgd(ratio=0.1),
    "two_stage": lambda: jaxcomm.two_stage_mean(dither(bits=8)),
}
SOME = ["mean", slow("top_k"), slow("global_qsgd"), slow("two_stage")]
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


def freezing(name: str, form: str) -> Any:
    """The transformation, in one of the forms that optax has for frozen leaves."""
    if form == "partition":
        return optax.partition({"trained": chain(name), "frozen": FROZEN}, LABELS)
    if form == "labels by a function":
        return optax.multi_transform(
            {"trained": chain(name), "frozen": FROZEN},
            lambda params: {key: LABELS[key] for key in params},
        )
    return optax.chain(optax.masked(chain(name), TRAINED), optax.masked(FROZEN, ELSE))


FORMS = ["partition", "labels by a function", "masked"]


def trained(loss_fn: Any, tx: Any, params: Any) -> tuple[Any, Account, dict[str, int]]:
    """The parameters after two steps of 8 workers, the account, and what the compiler sends."""
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((16, 30)), jnp.float32)
    params = jax.tree.map(jnp.asarray, params)
    state = jaxcomm.init(tx, params, mesh)
    step = jaxcomm.make_step(loss_fn, tx, mesh, donate=False)
    account = jaxcomm.wire.account(step, params, state, x)
    elements = compiled_collectives(compiled(jax.jit(step), (params, state, x)))
    for _ in range(2):
        params, state, _ = step(params, state, x)
    return jax.device_get(params), account, elements


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_the_wire_carries_nothing_of_frozen_leaves(name: str) -> None:
    """As if the base were no parameter, but a constant of the loss."""
    alone, expected, elements = trained(
        lambda adapter, x: loss({"adapter": adapter, "base": BASE}, x), chain(name), ADAPTER
    )
    for form in FORMS:
        params, account, sent = trained(loss, freezing(name, form), PARAMS)
        assert account.bytes_by_axis == expected.bytes_by_axis
        assert sent == elements
        jax.tree.map(np.testing.assert_array_equal, params["base"], BASE)
        assert np.any(params["adapter"]["b"] != 0)
        if name != "global_qsgd" and name != "two_stage":  # Coins depend on the paths of leaves.
            jax.tree.map(
                lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5),
                params["adapter"],
                alone,
            )


@pytest.mark.slow
def test_wrappers_of_the_whole_chain() -> None:
    tx = jaxcomm.skip_nonfinite(jaxcomm.accumulate(freezing("mean", "partition"), every=2))
    params, account, _ = trained(loss, tx, PARAMS)
    flag_and_loss = 2 * 7 / 8 * 4 * 2
    assert account.bytes_per_worker == 2 * 7 / 8 * 4 * (60 + 14) + flag_and_loss
    jax.tree.map(np.testing.assert_array_equal, params["base"], BASE)


def test_what_a_mean_sends_for_no_use_is_removed() -> None:
    tx = optax.chain(
        jaxcomm.mean(),
        optax.partition({"trained": optax.sgd(0.1, momentum=0.9), "frozen": FROZEN}, LABELS),
    )
    _, account, _ = trained(loss, tx, PARAMS)
    # XLA removes what is unused, and the account does not count it.
    assert account.bytes_per_worker == 2 * 7 / 8 * 4 * (60 + 14 + 1)


@pytest.mark.parametrize("form", ["set_to_zero", "masked"])
def test_an_update_that_comes_from_a_gradient_is_refused(form: str) -> None:
    """`optax.masked` alone would apply each worker's own gradient."""
    zero = optax.set_to_zero()
    tx = optax.partition({"trained": chain("mean"), "frozen": zero}, LABELS)
    if form == "masked":
        tx = optax.masked(chain("mean"), TRAINED)
    with pytest.raises(
        ValueError, match=r"\['base'\]\['bias'\] differs .* A frozen leaf needs `optax.stateless"
    ):
        trained(loss, tx, PARAMS)
