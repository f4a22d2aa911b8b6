"""Every aggregator beside sharded parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm
from tests.cases import CASES, Case

SPECS = {"kernel": P(None, "model"), "bias": P()}
SHAPES = {"kernel": (6, 8), "bias": (5,)}
# `parallax` is an `optax.partition` of two aggregators, `sharded_server` an optimizer, and
# `zeroth_order` evaluates the loss in place of gradients.
NESTABLE = [
    case
    for case in CASES
    if case.name != "parallax" and not case.name.startswith(("sharded_server", "zeroth_order"))
]

# Their collectives take leaves as they are.
WITHOUT_FLATTENING = {"mean", "zeroth_order", "zeroth_order_gaussian"}


def linear(params: Any, batch: Any) -> jax.Array:
    """Its gradient is the worker's row."""
    return sum(jnp.sum(params[name] * batch[name][0]) for name in params)


def batches(workers: int) -> Any:
    rng = np.random.default_rng(1)
    return {
        name: rng.normal(size=(workers, *shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def trained(aggregator: Any, shards: int, params: Any, steps: int = 2, **options: Any) -> Any:
    mesh = jax.make_mesh(
        (2, shards), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[: 2 * shards]
    )
    tx = optax.chain(aggregator, optax.sgd(1.0))
    params = {k: jax.device_put(x, NamedSharding(mesh, SPECS[k])) for k, x in params.items()}
    state = jaxcomm.init(tx, params, mesh, **options)
    step = jaxcomm.make_step(linear, tx, mesh, **options)
    rows = batches(2)
    if not steps:
        return jax.eval_shape(step, params, state, rows)[:2], (params, state)
    for _ in range(steps):
        params, state, _ = step(params, state, rows)
    return jax.tree.map(np.asarray, params)


@pytest.mark.parametrize("case", NESTABLE, ids=repr)
def test_one_shard_equals_the_whole(case: Case) -> None:
    """With one shard, the wrapper changes no bit of a group of leaves: here, of each leaf."""
    params = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    wrapped = trained(jaxcomm.shard_local(case.make(), SPECS), 1, params, shard_axes="model")
    for name, x in params.items():
        np.testing.assert_array_equal(wrapped[name], trained(case.make(), 1, {name: x})[name])


@pytest.mark.parametrize("case", NESTABLE, ids=repr)
def test_types_show_what_differs_by_worker(case: Case) -> None:
    """Parameters are equal on all workers; the state keeps its structure, shapes and marks."""
    params = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    tx = jaxcomm.shard_local(case.make(), SPECS)
    after, before = trained(tx, 4, params, steps=0, shard_axes="model")
    like = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert like(after) == like(before)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_whole_leaves_are_not_gathered_silently(case: Case) -> None:
    params = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    if case.name in WITHOUT_FLATTENING:
        trained(case.make(), 4, params, steps=0, shard_axes="model")
    else:
        with pytest.raises(ValueError, match="would gather them"):
            trained(case.make(), 4, params, steps=0, shard_axes="model")
