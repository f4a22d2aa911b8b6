"""The metrics of a step, and what is sent for them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import gossip
from jaxcomm.synchronization import diloco, local_sgd, streaming_diloco
from tests.training.places import at, begun

N = 4
START = jnp.float32(0)
TARGETS = np.arange(N, dtype=np.float32)
PLACES = pytest.mark.parametrize("where", ["auto 4", "simulated 4"])


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean((w - x) ** 2)


class Again(NamedTuple):
    count: jax.Array


@PLACES
def test_means_at_an_interval(where: str) -> None:
    """In the last of every three steps; a counter that starts again does not count."""
    again = optax.GradientTransformation(
        lambda params: Again(jnp.zeros((), jnp.int32)),
        lambda updates, state, params=None: (updates, Again((state.count + 1) % 2)),
    )
    still = optax.scale_by_schedule(lambda count: 0.0)
    tx = optax.chain(jaxcomm.mean(), again, still)
    params, (step, state), losses = START, begun(loss, tx, at(where), START, metrics=3), []
    for _ in range(6):
        params, state, metrics = step(params, state, TARGETS)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, [np.nan, np.nan, np.mean(TARGETS**2)] * 2)


@PLACES
def test_weighted_means_of_finite_parts(where: str) -> None:
    def gradients(loss_fn: Any, w: Any, batch: Any) -> Any:
        x, weight = batch[0][0], batch[1][0]
        # A mean over no rows is NaN.
        value, gradient = jnp.where(weight == 0, jnp.nan, jnp.stack([(w - x) ** 2, 2 * (w - x)]))
        return value, gradient, weight

    tx = optax.chain(jaxcomm.mean(), optax.sgd(0.5))
    step, state = begun(loss, tx, at(where), START, gradients=gradients)

    def weighted_step(*weights: float) -> tuple[Any, ...]:
        params, _, metrics = step(START, state, (TARGETS, np.array(weights, np.float32)))
        return metrics["weight"], metrics["loss"], params

    means = [np.average(x, weights=[1, 0, 0, 3]) for x in (TARGETS**2, TARGETS)]
    np.testing.assert_allclose(weighted_step(1, 0, 0, 3), [4, *means])
    np.testing.assert_allclose(weighted_step(0, 0, 0, 0), [0, np.nan, 0])
    for weights in ([1, -1, 2, 0], [1, np.inf, 0, 0]):
        assert np.isnan(weighted_step(*weights)[1:]).all()


LOCAL = {
    "local_sgd": optax.chain(optax.sgd(0.1), local_sgd(4)),
    "diloco": diloco(optax.sgd(0.1), optax.sgd(0.7), 4),
    "streaming": streaming_diloco(optax.sgd(0.1), optax.sgd(0.7), 4, fragments=1),
    "dpsgd": optax.chain(optax.sgd(0.1), gossip.dpsgd(gossip.ring(N))),
    "matcha": optax.chain(
        optax.sgd(0.1), gossip.matcha(gossip.matcha_plan(gossip.ring(N), budget=0.5))
    ),
}


@pytest.mark.parametrize("name", LOCAL)
def test_an_inner_step_sends_only_what_its_rule_sends(name: str) -> None:
    """Neither metrics nor a model state, of which each worker keeps its own."""
    mesh = at("auto 4")
    params = jaxcomm.replicate(START, mesh)
    of_state = lambda w, seen, x: (loss(w, x), seen + jnp.mean(x))  # noqa: E731
    step, state = begun(of_state, LOCAL[name], mesh, params, metrics="own", has_model_state=True)
    found = jaxcomm.wire.account(step, params, params, state, TARGETS).collectives
    assert found  # It does meet.
    outside = {each.kind for each in found if not any("cond" in part for part in each.path)}
    assert outside == ({"ppermute"} if name == "dpsgd" else set())
