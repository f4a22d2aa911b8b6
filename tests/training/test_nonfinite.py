"""The description of a non-finite loss names the worker and the leaf."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxcomm
from jaxcomm import gossip
from jaxcomm.training import describe_nonfinite
from tests.workers import mesh_of

WORKERS = 4


def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    return jnp.mean((batch @ params["w"] + params["deep"]["b"]) ** 2)


def start() -> Any:
    return {"w": jnp.linspace(-1, 1, 5), "deep": {"b": jnp.float32(0.5)}}


def batch_with(value: float, row: int = 5) -> np.ndarray:
    batch = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
    batch[row, 2] = value
    return batch


def layout(kind: str) -> Any:
    if kind == "explicit":
        return jax.make_mesh(
            (WORKERS,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:WORKERS]
        )
    return mesh_of(WORKERS) if kind == "mesh" else WORKERS


LAYOUTS = ["simulated", "mesh", "explicit"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_it_names_the_worker_and_the_leaves(kind: str) -> None:
    where = layout(kind)
    assert describe_nonfinite(loss_fn, start(), batch_with(1.0), where) is None
    assert describe_nonfinite(loss_fn, start(), batch_with(np.nan), where) == (
        "worker 2 of 4: NaN in the loss and NaN in the gradient of `deep/b`, `w`"
    )


def test_an_infinite_loss_whose_gradient_is_partly_finite() -> None:
    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return jnp.mean(params["a"] * batch) + jnp.sum(jnp.sqrt(params["b"] * jnp.min(batch)))

    params = {"a": jnp.float32(1), "b": jnp.zeros(2)}
    batch = jnp.ones(WORKERS)
    found = describe_nonfinite(loss, params, batch.at[1:3].set(4.0), WORKERS)
    assert found == "workers 0, 1, 2 and 1 more of 4: infinity in the gradient of `b`"


def test_parameters_come_first_and_long_lists_are_cut() -> None:
    params = {f"p{i}": jnp.float32(1) for i in range(6)}
    loss = lambda params, x: jnp.mean(x) * sum(params.values())  # noqa: E731
    batch = jnp.ones(8).at[7].set(jnp.inf)
    assert describe_nonfinite(loss, params, batch, 8) == (
        "worker 7 of 8: infinity in the loss and infinity in the gradient of `p0`, `p1`, `p2` and "
        "3 more"
    )
    found = describe_nonfinite(loss, {**params, "p4": jnp.float32(jnp.nan)}, jnp.ones(2), 2)
    assert found == "workers 0, 1 of 2: NaN in the parameters of `p4`"


def test_several_axes_and_devices_of_one_worker() -> None:
    sizes = {"data": 2, "part": 2}
    mesh = jax.make_mesh(
        (2, 2), (*sizes,), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    for where in (sizes, mesh):
        found = describe_nonfinite(loss_fn, start(), batch_with(np.nan), where)
        assert found and found.startswith("worker 1 of 2: NaN in the loss")
        both = describe_nonfinite(
            loss_fn, start(), batch_with(np.nan), where, axis_name=("data", "part")
        )
        assert both and both.startswith("worker 2 of 4: NaN in the loss")


def test_what_else_a_step_may_have() -> None:
    """A key, metrics, a model state and weights."""
    rows = batch_with(np.nan)

    def loss(params: Any, state: Any, batch: jax.Array, key: jax.Array) -> Any:
        value = loss_fn(params, batch) + 0 * jax.random.normal(key)
        return value, ({"mean": jnp.mean(batch)}, {"per_row": batch[:, 0]})

    found = describe_nonfinite(
        loss,
        start(),
        rows,
        WORKERS,
        has_aux=True,
        model_state={"mean": jnp.float32(0)},
        key=jax.random.key(0),
    )
    assert found and found.startswith("worker 2 of 4: NaN in the loss")

    def weighted(loss_fn: Any, params: Any, batch: jax.Array) -> Any:
        value, gradient = jaxcomm.local_value_and_grad(loss_fn)(params, batch)
        return value, gradient, jnp.where(jnp.isnan(value), 0.0, 1.0)

    assert describe_nonfinite(loss_fn, start(), rows, WORKERS, gradients=weighted) is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["simulated", "mesh"])
def test_after_a_step(kind: str) -> None:
    """Without `skip_nonfinite` all parameters are NaN; with it, they are those before."""
    where, make = layout(kind), jaxcomm.make_step if kind == "mesh" else jaxcomm.simulate
    plain, rows = optax.chain(jaxcomm.global_qsgd(), optax.sgd(0.1)), batch_with(np.nan)
    for tx, skips in ((plain, False), (jaxcomm.skip_nonfinite(plain), True)):
        step = make(loss_fn, tx, where, donate=False)
        before = start()
        after, state, metrics = step(before, jaxcomm.init(tx, before, where), rows)
        assert np.isnan(metrics["loss"])
        finite = [bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(after)]
        assert finite == [skips, skips]
        found = describe_nonfinite(loss_fn, after if skips else before, rows, where)
        assert found and found.startswith("worker 2 of 4: NaN in the loss")
        if skips:
            assert (metrics["diagnostics/skipped_steps"], state.skipped_steps) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["simulated", "mesh"])
def test_gossip_keeps_a_nan_from_the_neighbors(kind: str) -> None:
    """The worker with the NaN only mixes; nobody's parameters or moments are ever non-finite."""
    where, make = layout(kind), jaxcomm.make_step if kind == "mesh" else jaxcomm.simulate
    tx = optax.chain(
        jaxcomm.per_worker(optax.sgd(0.1, momentum=0.9)),
        gossip.dpsgd(gossip.ring(WORKERS), diagnostics=True),
    )
    step = make(loss_fn, tx, where)
    params = jaxcomm.replicate(start(), where)
    state = jaxcomm.init(tx, params, where)
    for number in range(4):
        poisoned = number in (1, 2)
        rows = batch_with(np.nan if poisoned else 1.0)
        params, state, metrics = step(params, state, rows)
        assert np.isnan(metrics["loss"]) == poisoned
        for leaf in jax.tree.leaves((params, state)):
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                assert np.isfinite(np.asarray(leaf)).all()
        assert metrics["diagnostics/skipped_steps"] == min(number, 2)
        np.testing.assert_array_equal(
            state[1].skipped_steps.per_worker["data"], np.eye(4)[2] * min(number, 2)
        )
    found = describe_nonfinite(loss_fn, params, batch_with(np.nan), where)
    assert found == "worker 2 of 4: NaN in the loss and NaN in the gradient of `deep/b`, `w`"
    spoiled = jax.tree.map(lambda x: x.at[3].set(jnp.inf), params)
    found = describe_nonfinite(loss_fn, spoiled, batch_with(1.0), where)
    assert found == "worker 3 of 4: infinity in the parameters of `deep/b`, `w`"
