"""The simulator against exact moments of linear methods on quadratics."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from experiments.tasks import objectives
from experiments.training.moments import exact_distances, exact_distances_of_mean
from jaxcomm import gossip
from jaxcomm.synchronization import local_sgd

WORKERS, STEPS, SEEDS = 4, 12, 400
RATES = 0.2 / (1 + 0.1 * np.arange(STEPS))
RING = gossip.mixing_matrix(gossip.ring(WORKERS))
MEAN, APART = np.full((WORKERS, WORKERS), 1 / WORKERS), np.eye(WORKERS)
OBJECTIVE = objectives.quadratic(WORKERS)
START = OBJECTIVE.solution + np.float32(0.05)

LINEAR: dict[str, tuple[Callable[[], optax.GradientTransformation], Callable, bool, bool]] = {
    "mean": (jaxcomm.mean, lambda step: MEAN, False, False),
    "local": (lambda: local_sgd(3), lambda step: MEAN if step % 3 == 2 else APART, False, True),
    "dpsgd": (lambda: gossip.dpsgd(gossip.ring(WORKERS)), lambda step: RING, True, True),
    "adapt": (
        lambda: gossip.dpsgd(gossip.ring(WORKERS), order="adapt_then_combine"),
        lambda step: RING, False, True,
    ),
}  # fmt: skip


def simulated(make: Callable[[], optax.GradientTransformation], per_worker: bool) -> np.ndarray:
    """The mean squared distance over many seeds after each step, and its standard error."""

    def run(seed: jax.Array) -> jax.Array:
        params = jnp.asarray(START)
        if per_worker:
            params = jaxcomm.replicate(params, WORKERS)

        def transformation(rate: jax.Array | float) -> optax.GradientTransformation:
            stages = [make(), optax.sgd(rate)]
            return optax.chain(*(stages[::-1] if per_worker else stages))

        def body(carry: tuple, given: tuple) -> tuple:
            rate, number = given
            step = jaxcomm.simulate(objectives.loss, transformation(rate), WORKERS)
            key = jax.random.fold_in(jax.random.key(seed), number)
            params, state, _ = step(*carry, objectives.draw(OBJECTIVE, key))
            model = jaxcomm.consensus(params) if per_worker else params
            return (params, state), jnp.sum(jnp.square(model - OBJECTIVE.solution))

        first = params, jaxcomm.init(transformation(0.1), params, WORKERS)
        given = jnp.asarray(RATES, jnp.float32), jnp.arange(STEPS, dtype=jnp.uint32)
        return jax.lax.scan(body, first, given)[1]

    found = np.asarray(jax.jit(jax.vmap(run))(jnp.arange(SEEDS, dtype=jnp.uint32)), np.float64)
    return np.stack([found.mean(axis=0), found.std(axis=0) / SEEDS**0.5])


@pytest.mark.slow
@pytest.mark.parametrize("name", LINEAR)
def test_the_simulator_has_the_exact_moments(name: str) -> None:
    make, mixing, combines_first, per_worker = LINEAR[name]
    expected = exact_distances(OBJECTIVE, RATES, START, mixing, combines_first=combines_first)
    mean, error = simulated(make, per_worker)
    assert np.max(np.abs(mean - expected) / error) < 5
    assert np.max(error / mean) < 0.02  # A wrong factor of a tenth would be seen.


def test_the_two_recursions_agree_and_one_step_is_the_formula() -> None:
    """From the minimum, one step has the error rate² (variance of the mean of the gradients)."""
    expected = exact_distances(OBJECTIVE, RATES, START, lambda step: MEAN)
    found = exact_distances_of_mean(OBJECTIVE, RATES, START)
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    known = objectives.constants(OBJECTIVE)
    (found,) = exact_distances_of_mean(OBJECTIVE, np.array([0.1]), np.float64(OBJECTIVE.solution))
    assert found == pytest.approx(0.1**2 * known.variance / WORKERS, rel=1e-5)
