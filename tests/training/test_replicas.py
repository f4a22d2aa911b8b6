"""Replicas have the same bits, also where a transformation runs the loss and no types are checked.

`wait_free` and `zeroth_order` run the loss in the update, so the whole step is unchecked.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import scheduling
from tests.slow import slow
from tests.training.places import at, begun, normal

SIDE, ROWS = 6, 16


METHODS: dict[str, Any] = {
    "zeroth_order": lambda: jaxcomm.zeroth_order(4, smoothing=0.5),
    "wait_free, mean": lambda: scheduling.wait_free(jaxcomm.mean()),
    "wait_free, global_qsgd": lambda: scheduling.wait_free(jaxcomm.global_qsgd()),
    "wait_free, power_sgd": lambda: scheduling.wait_free(jaxcomm.power_sgd(rank=1)),
    "wait_free, top_k": lambda: scheduling.wait_free(jaxcomm.top_k_sgd(ratio=0.2)),
}
FIRST = ["zeroth_order", "wait_free, power_sgd"]


START = {
    "a": jnp.asarray(normal(0, SIDE, SIDE) / 3),
    "b": jnp.asarray(normal(1, SIDE) / 3),
    "c": jnp.asarray(normal(2, SIDE, SIDE) / 3),
}


def loss(params: Any, x: jax.Array, key: jax.Array) -> Any:
    """A quadratic, whose differences along a direction are exact; and metrics."""
    x = x + 0.1 * jax.random.normal(key, x.shape)
    error = x @ (params["a"] - params["c"]) + params["b"][None] - 1
    return jnp.mean(error**2), {"error": jnp.mean(error)}


def with_state(params: Any, state: Any, x: jax.Array, key: jax.Array) -> Any:
    value, aux = loss(params, x, key)
    return value, ({"mean": 0.9 * state["mean"] + 0.1 * jnp.mean(x, axis=0)}, aux)


def trained(where: str, tx: Any, **options: Any) -> Any:
    """Three steps: parameters, model state and optimizer state, and the metrics of the last.

    Without a model state if `zeroth_order` comes first, which refuses it.
    """
    chain, states = optax.chain(tx, optax.sgd(0.05, momentum=0.9)), [{"mean": jnp.zeros(SIDE)}]
    if options.pop("stateless", False):
        states = []
    given: Any = {"has_aux": True, "has_model_state": bool(states), **options}
    step, state = begun(with_state if states else loss, chain, at(where), START, **given)
    carry = (START, *states, state)
    for seed in range(3):
        *carry, metrics = step(*carry, normal(seed, ROWS, SIDE), key=jax.random.key(seed))
    return carry, metrics


def require_equal_replicas(tree: Any) -> None:
    """Devices that hold the same part of a leaf, mostly all of it, hold the same bytes of it."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        assert x.sharding.is_fully_replicated or "per_worker" in jax.tree_util.keystr(path), path
        held: dict[str, set[bytes]] = {}
        for shard in x.addressable_shards:
            held.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        assert len(x.addressable_shards) == 8
        assert all(len(each) == 1 for each in held.values()), path


def test_the_check_of_replicas() -> None:
    mesh = at("auto")
    index = lambda: jax.lax.axis_index("data")  # noqa: E731
    run = jax.shard_map(index, mesh=mesh, in_specs=(), out_specs=jax.P(), check_vma=False)
    different = jax.jit(run)()
    with pytest.raises(AssertionError):
        require_equal_replicas({"x": different})


@pytest.mark.parametrize(
    ("method", "where"),
    [
        *((method, "auto") for method in FIRST),
        *(slow(method, "auto") for method in METHODS if method not in FIRST),
        *(slow(method, where) for method in FIRST for where in ("explicit", "auto 4x2")),
    ],
)
def test_all_devices_hold_the_same_bytes(method: str, where: str) -> None:
    require_equal_replicas(trained(where, METHODS[method](), stateless=method == "zeroth_order"))


@pytest.mark.parametrize(
    ("method", "second", "where"),
    [
        ("wait_free, mean", jaxcomm.mean(), "auto"),
        ("zeroth_order", jaxcomm.mean(), "simulated"),
        slow("wait_free, mean", jaxcomm.global_qsgd(), "explicit"),
        slow("zeroth_order", jaxcomm.power_sgd(rank=1), "auto 4x2"),
    ],
)
def test_a_second_aggregator_is_refused(method: str, second: Any, where: str) -> None:
    with pytest.raises(ValueError, match=r"does not vary over .*: it has been summed already"):
        trained(where, optax.chain(METHODS[method](), second), stateless=True)
