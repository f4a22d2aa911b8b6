"""Replicas have the same bits, also where a transformation runs the loss and no types are checked.

`wait_free` and `zeroth_order` run the loss in the update, so the whole step is unchecked. With
`gradients=`, they get gradients that exist, and the update is checked: results are the same.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxcomm
from jaxcomm import scheduling
from tests.slow import slow

SIDE, ROWS = 6, 16


def mesh_of(kind: AxisType, *sizes: int) -> Any:
    return jax.make_mesh(sizes, ("data", "inner")[: len(sizes)], (kind,) * len(sizes))


WHERE: dict[str, Any] = {
    "auto": lambda: mesh_of(AxisType.Auto, 8),
    "explicit": lambda: mesh_of(AxisType.Explicit, 8),
    "inner devices": lambda: mesh_of(AxisType.Auto, 4, 2),
    "simulated": lambda: 8,
}
METHODS: dict[str, Any] = {
    "global_qsgd": jaxcomm.global_qsgd,
    "top_k": lambda: jaxcomm.top_k_sgd(ratio=0.2),
    "power_sgd": lambda: jaxcomm.power_sgd(rank=1),
    "mean": jaxcomm.mean,
    "wait_free, mean": lambda: scheduling.wait_free(jaxcomm.mean()),
    "wait_free, global_qsgd": lambda: scheduling.wait_free(jaxcomm.global_qsgd()),
    "wait_free, power_sgd": lambda: scheduling.wait_free(jaxcomm.power_sgd(rank=1)),
    "wait_free, top_k": lambda: scheduling.wait_free(jaxcomm.top_k_sgd(ratio=0.2)),
    "zeroth_order": lambda: jaxcomm.zeroth_order(4, smoothing=0.5),
}
FIRST = ["global_qsgd", "top_k", "power_sgd", "zeroth_order", "wait_free, global_qsgd"]
OTHERS = [name for name in METHODS if name not in FIRST]
RUNS_LOSS = [name for name in METHODS if name.startswith(("wait_free", "zeroth_order"))]


def start() -> Any:
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 3, jnp.float32)  # noqa: E731
    return {"a": draw(SIDE, SIDE), "b": draw(SIDE), "c": draw(SIDE, SIDE)}


def rows(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, SIDE)).astype(np.float32)


def loss(params: Any, x: jax.Array, key: jax.Array) -> Any:
    """A quadratic, whose differences along a direction are exact; and metrics."""
    x = x + 0.1 * jax.random.normal(key, x.shape)
    error = x @ (params["a"] - params["c"]) + params["b"][None] - 1
    return jnp.mean(error**2), {"error": jnp.mean(error)}


def with_state(params: Any, state: Any, x: jax.Array, key: jax.Array) -> Any:
    value, aux = loss(params, x, key)
    return value, ({"mean": 0.9 * state["mean"] + 0.1 * jnp.mean(x, axis=0)}, aux)


def trained(where: str, tx: Any, loss_fn: Any = loss, **options: Any) -> Any:
    """Five steps: parameters, model state and optimizer state, and the metrics of the last."""
    workers, chain = WHERE[where](), optax.chain(tx, optax.sgd(0.05, momentum=0.9))
    make: Any = jaxcomm.simulate if isinstance(workers, int) else jaxcomm.make_step
    has_model_state = loss_fn is with_state
    step = make(loss_fn, chain, workers, has_aux=True, has_model_state=has_model_state, **options)
    states = [{"mean": jnp.zeros(SIDE)}] if has_model_state else []
    carry = (start(), *states, jaxcomm.init(chain, start(), workers))
    for seed in range(5):
        *carry, metrics = step(*carry, rows(seed), key=jax.random.key(seed))
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
    mesh = WHERE["auto"]()
    index = lambda: jax.lax.axis_index("data")  # noqa: E731
    run = jax.shard_map(index, mesh=mesh, in_specs=(), out_specs=jax.P(), check_vma=False)
    different = jax.jit(run)()
    with pytest.raises(AssertionError):
        require_equal_replicas({"x": different})


@pytest.mark.parametrize("where", ["auto", *map(slow, ["explicit", "inner devices"])])
@pytest.mark.parametrize("method", [*FIRST, *map(slow, OTHERS)])
def test_all_devices_hold_the_same_bytes(method: str, where: str) -> None:
    loss_fn = loss if method == "zeroth_order" else with_state  # It refuses a model state.
    carry, metrics = trained(where, METHODS[method](), loss_fn)
    require_equal_replicas((carry, metrics))


def checked(loss_fn: Any, params: Any, *args: Any, **model_state: Any) -> Any:
    """As `gradients=`, after which the update is checked."""
    run = jaxcomm.local_value_and_grad(loss_fn, has_aux=True)
    return run(params, *model_state.values(), *args)


@pytest.mark.parametrize("where", ["auto", *map(slow, ["explicit", "simulated"])])
@pytest.mark.parametrize("method", [*RUNS_LOSS[-2:], *map(slow, RUNS_LOSS[:-2])])
def test_results_are_those_of_the_checked_update(method: str, where: str) -> None:
    loss_fn = loss if method == "zeroth_order" else with_state
    inside, mine = trained(where, METHODS[method](), loss_fn)
    after, others = trained(where, METHODS[method](), loss_fn, gradients=checked)
    assert jax.tree.structure(inside) == jax.tree.structure(after)
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    for path, x in jax.tree_util.tree_leaves_with_path(inside):
        other = dict(jax.tree_util.tree_leaves_with_path(after))[path]
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, other = jax.random.key_data(x), jax.random.key_data(other)
        compare(x, other, err_msg=jax.tree_util.keystr(path))
    if method != "zeroth_order":  # Its metrics are means over the points.
        jax.tree.map(compare, mine, others)


SECOND = {
    "mean": jaxcomm.mean,
    "global_qsgd": jaxcomm.global_qsgd,
    "top_k": lambda: jaxcomm.top_k_sgd(ratio=0.2),
    "power_sgd": lambda: jaxcomm.power_sgd(rank=1),
}


@pytest.mark.parametrize("where", ["auto", *map(slow, ["explicit", "inner devices", "simulated"])])
@pytest.mark.parametrize("second", ["mean", *map(slow, [*SECOND][1:])])
@pytest.mark.parametrize("method", ["wait_free, mean", "zeroth_order"])
def test_a_second_aggregator_is_refused(method: str, second: str, where: str) -> None:
    tx = optax.chain(METHODS[method](), SECOND[second]())
    with pytest.raises(ValueError, match=r"does not vary over .*: it has been summed already"):
        trained(where, tx)
