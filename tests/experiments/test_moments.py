"""The simulator against exact moments of SGD on quadratics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from experiments.tasks import objectives
from experiments.training.moments import exact_distances, exact_distances_of_mean

WORKERS, STEPS, SEEDS = 4, 12, 400
RATES = 0.2 / (1 + 0.1 * np.arange(STEPS))
MEAN = np.full((WORKERS, WORKERS), 1 / WORKERS)
OBJECTIVE = objectives.quadratic(WORKERS)
START = OBJECTIVE.solution + np.float32(0.05)


@pytest.mark.slow
def test_the_simulator_has_the_exact_moments() -> None:
    """The mean squared distance after each step, over many seeds."""

    def transformation(rate: jax.Array | float) -> optax.GradientTransformation:
        return optax.chain(jaxcomm.mean(), optax.sgd(rate))

    def run(seed: jax.Array) -> jax.Array:
        def body(carry: tuple, given: tuple) -> tuple:
            rate, number = given
            step = jaxcomm.simulate(objectives.loss, transformation(rate), WORKERS)
            key = jax.random.fold_in(jax.random.key(seed), number)
            params, state, _ = step(*carry, objectives.draw(OBJECTIVE, key))
            return (params, state), jnp.sum(jnp.square(params - OBJECTIVE.solution))

        first = jnp.asarray(START), jaxcomm.init(transformation(0.1), jnp.asarray(START), WORKERS)
        given = jnp.asarray(RATES, jnp.float32), jnp.arange(STEPS, dtype=jnp.uint32)
        return jax.lax.scan(body, first, given)[1]

    found = np.asarray(jax.jit(jax.vmap(run))(jnp.arange(SEEDS, dtype=jnp.uint32)), np.float64)
    mean, error = found.mean(axis=0), found.std(axis=0) / SEEDS**0.5
    expected = exact_distances_of_mean(OBJECTIVE, RATES, START)
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
