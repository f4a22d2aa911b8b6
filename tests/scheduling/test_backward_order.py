"""The order of gradients, found by tracing."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxcomm
from jaxcomm import scheduling
from jaxcomm.compression import feedback, sparsifiers

SIDES = {"c": (4, 32), "a": (32, 32), "b": (32, 8), "d": (8, 1)}  # In forward order.


def chain_params() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=s) / 4, jnp.float32) for name, s in SIDES.items()}


def chain_loss(p: Any, x: jax.Array) -> jax.Array:
    for name in SIDES:
        x = jnp.tanh(x @ p[name])
    return jnp.mean(x**2)


@pytest.mark.parametrize(
    "wrap",
    [lambda f: f, jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))],
    ids=["plain", "jit", "remat", "jit of remat"],
)
def test_the_last_layer_comes_first(wrap: Any) -> None:
    found = scheduling.backward_order(wrap(chain_loss), chain_params(), jnp.ones((5, 4)))
    assert found == ("['d']", "['b']", "['a']", "['c']")


def test_tied_and_unused_leaves() -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ p["tied"])
        return jnp.mean((jnp.tanh(h @ p["middle"]) @ p["tied"].T) ** 2)

    p = {"tied": jnp.ones((4, 3)), "middle": jnp.ones((3, 3)), "unused": jnp.ones(2)}
    found = scheduling.backward_order(loss, p, jnp.ones((5, 4)))
    assert found.index("['middle']") < found.index("['tied']")
    assert set(found) == {"['tied']", "['middle']", "['unused']"}


def test_stacks_and_aux() -> None:
    def loss(p: Any, x: jax.Array) -> Any:
        h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["layers"])
        return jnp.mean((h @ p["a_last"]) ** 2), {"norm": jnp.sum(h)}

    p = {"layers": jnp.ones((3, 4, 4)), "a_last": jnp.ones(4)}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), p)
    found = scheduling.backward_order(loss, shapes, jnp.ones((5, 4)), has_aux=True)
    assert found == ("['a_last']", "['layers']")


def test_seconds_follow_operations() -> None:
    """Each gradient waits for its own product, and for that of the layer after it."""
    times = scheduling.estimated_times(
        chain_loss, chain_params(), jnp.ones((64, 4)), forward_seconds=1.0, backward_seconds=2.0
    )
    assert times.names == ("['d']", "['b']", "['a']", "['c']")
    assert times.sizes == tuple(4.0 * np.prod(SIDES[name]) for name in "dbac")
    np.testing.assert_allclose(sum(times.backward), 2.0, rtol=1e-6)
    np.testing.assert_allclose(sum(times.forward), 1.0, rtol=1e-6)
    own = np.array([8, 32 * 8, 32 * 32, 4 * 32], float)
    products = own + np.concatenate([[0.0], own[:-1]])
    np.testing.assert_allclose(np.array(times.backward) / 2, products / products.sum(), atol=0.02)


def top_k(ratio: float) -> Any:
    sparse = feedback.error_feedback(sparsifiers.top_k(ratio=ratio))
    return jaxcomm.all_gather_mean(sparse, scope="leaf")


@pytest.mark.slow
def test_a_plan_trains_with_a_ratio_for_each_group() -> None:
    """From the loss to a plan to a step, which sends the messages of the plan."""
    params, x = chain_params(), jnp.asarray(np.random.default_rng(1).normal(size=(8, 4)), "float32")
    times = scheduling.estimated_times(
        chain_loss, params, x[:2], forward_seconds=1e-3, backward_seconds=2e-3
    )

    buckets = scheduling.bucket_plan(times, bucket_bytes=1000).named(times)
    assert buckets == (("['d']", "['b']"), ("['a']",), ("['c']",))
    groups = scheduling.wait_free_plan(times).named(times)
    ratios = [1.0, 0.5, 0.25, 0.125]
    chain = optax.chain(
        scheduling.wait_free([top_k(ratio) for ratio in ratios], plan=groups), optax.sgd(1.0)
    )
    step = jaxcomm.simulate(chain_loss, chain, 1, metrics="own", donate=False)
    found, _, _ = step(params, jaxcomm.init(chain, params, 1), x)
    for ratio, (path,) in zip(ratios, groups, strict=True):
        name = path[2]
        changed = np.mean(np.asarray(found[name]) != np.asarray(params[name]))
        assert ratio * 0.9 <= changed <= ratio + 1e-9
