"""The description of a non-finite loss names the worker and the leaf."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm.training import describe_nonfinite
from tests.slow import slow
from tests.training.places import at

WORKERS = 4


def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    return jnp.mean((batch @ params["w"] + params["deep"]["b"]) ** 2)


def start() -> Any:
    return {"w": jnp.linspace(-1, 1, 5), "deep": {"b": jnp.float32(0.5)}}


def batch_with(value: float, row: int = 5) -> np.ndarray:
    batch = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
    batch[row, 2] = value
    return batch


@pytest.mark.parametrize("where", ["simulated 4", *map(slow, ["auto 4", "explicit 4"])])
def test_it_names_the_worker_and_the_leaves(where: str) -> None:
    workers = at(where)
    assert describe_nonfinite(loss_fn, start(), batch_with(1.0), workers) is None
    expected = "worker 2 of 4: NaN in the loss and NaN in the gradient of `deep/b`, `w`"
    assert describe_nonfinite(loss_fn, start(), batch_with(np.nan), workers) == expected
    own = jaxcomm.replicate(start(), workers)
    assert describe_nonfinite(loss_fn, own, batch_with(np.nan), workers) == expected
    spoiled = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)).at[3].set(jnp.inf), own)
    found = describe_nonfinite(loss_fn, spoiled, batch_with(1.0), workers)
    assert found == "worker 3 of 4: infinity in the parameters of `deep/b`, `w`"


def test_an_infinite_loss_whose_gradient_is_partly_finite() -> None:
    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return jnp.mean(params["a"] * batch) + jnp.sum(jnp.sqrt(params["b"] * jnp.min(batch)))

    params = {"a": jnp.float32(1), "b": jnp.zeros(2)}
    batch = jnp.ones(WORKERS)
    found = describe_nonfinite(loss, params, batch.at[1:3].set(4.0), WORKERS)
    assert found == "workers 0, 1, 2 and 1 more of 4: infinity in the gradient of `b`"


@pytest.mark.parametrize("where", ["simulated 2x2", "auto 2x2"])
def test_several_axes_and_devices_of_one_worker(where: str) -> None:
    run = functools.partial(describe_nonfinite, loss_fn, start(), batch_with(np.nan), at(where))
    assert (run() or "").startswith("worker 1 of 2: NaN in the loss")
    both = run(axis_name=("data", "inner"))
    assert (both or "").startswith("worker 2 of 4: NaN in the loss")


def test_other_options_of_a_step() -> None:
    """A model state, metrics, a key, what all share, and weights."""
    rows = batch_with(np.nan)

    def loss(params: Any, state: Any, batch: jax.Array, key: jax.Array, shared: Any) -> Any:
        value = loss_fn(params, batch) + state + shared + jax.random.uniform(key)
        return value, (state, {"per_row": batch[:, 0]})

    given: Any = {"has_aux": True, "model_state": jnp.float32(0), "key": jax.random.key(0)}
    for batch, shared, expected in (
        (rows, 0.0, "worker 2 of 4: NaN in the loss"),
        (batch_with(1.0), np.nan, "workers 0, 1, 2 and 1 more of 4: NaN in the loss"),
    ):
        options = given | {"shared": jnp.float32(shared)}
        found = describe_nonfinite(loss, start(), batch, WORKERS, **options)
        assert found and found.startswith(expected)

    def weighted(loss_fn: Any, params: Any, batch: jax.Array) -> Any:
        value, gradient = jaxcomm.local_value_and_grad(loss_fn)(params, batch)
        return value, gradient, jnp.where(jnp.isnan(value), 0.0, 1.0)

    assert describe_nonfinite(loss_fn, start(), rows, WORKERS, gradients=weighted) is None
