"""Objectives of the study of convergence: their constants, against numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.tasks import objectives
from experiments.tasks.objectives import Constants, Objective, constants, logistic, quadratic
from tests.slow import slow

WORKERS = 4
DRAWS = 2000


def gradients(objective: Objective, x: np.ndarray, draws: int) -> np.ndarray:
    """Stochastic gradients of all workers, float64[draws, n, d]."""

    def of_worker(row: objectives.Draw) -> jax.Array:
        alone = jax.tree.map(lambda part: part[None], row)
        return jax.grad(objectives.loss)(jnp.asarray(x, jnp.float32), alone)

    def of_draw(key: jax.Array) -> jax.Array:
        return jax.vmap(of_worker)(objectives.draw(objective, key))

    keys = jax.random.split(jax.random.key(0), draws)
    return np.asarray(jax.jit(jax.vmap(of_draw))(keys), np.float64)


@pytest.mark.parametrize("make", [quadratic, slow(logistic)])
def test_the_constants_are_those_of_drawn_gradients(make: object) -> None:
    objective = make(WORKERS)  # type: ignore[operator]
    known, drawn = constants(objective), gradients(objective, objective.solution, DRAWS)
    means = drawn.mean(axis=0)
    variance = np.mean(np.sum((drawn - means) ** 2, axis=-1))
    np.testing.assert_allclose(variance, known.variance, rtol=0.05)
    # The mean over draws has an error of its own.
    dissimilarity = np.mean(np.sum(means**2, axis=1)) - variance / DRAWS
    np.testing.assert_allclose(dissimilarity, known.dissimilarity, rtol=0.1)
    assert np.sum(means.mean(axis=0) ** 2) < 3 * variance / (DRAWS * WORKERS)


@pytest.mark.slow
def test_the_variance_of_quadratics_grows_with_the_gradient() -> None:
    for workers in (4, 16, 64):
        found = constants(quadratic(workers))
        np.testing.assert_allclose(found, Constants(1, 4, 1.25, 0.25, 1), rtol=1e-5)
    objective = quadratic(WORKERS)
    known, x = constants(objective), objective.solution + np.float32(1)
    drawn = gradients(objective, x, DRAWS)
    means = np.float64(objective.curvature * (x - objective.center))
    variance = np.sum((drawn - means) ** 2, axis=-1).mean(axis=0)
    expected = float(objective.noise) ** 2 + known.growth * np.sum(means**2, axis=1)
    np.testing.assert_allclose(variance, expected, rtol=0.1)


@pytest.mark.parametrize("make", [quadratic, slow(logistic)])
def test_the_curvatures_are_those_of_the_mean_loss(make: object) -> None:
    """Quadratics exactly; of the logistic losses, the smoothness is a bound."""
    objective = make(WORKERS)  # type: ignore[operator]
    workers, count = objective.labels.shape

    def repeated(part: np.ndarray) -> np.ndarray:
        return np.broadcast_to(part, (count, *part.shape))

    every = objectives.Draw(
        curvature=repeated(objective.curvature),
        center=repeated(objective.center),
        shift=repeated(np.zeros_like(objective.center)),
        factor=repeated(np.ones(workers, np.float32)),
        inputs=objective.inputs.swapaxes(0, 1),
        labels=objective.labels.swapaxes(0, 1),
        logistic=repeated(np.full(workers, objective.logistic)),
    )

    def mean_loss(x: jax.Array) -> jax.Array:
        return jnp.mean(jax.vmap(objectives.loss, (None, 0))(x, every))

    x = jnp.linspace(-1, 1, objectives.DIMENSION)
    values = np.linalg.eigvalsh(np.float64(jax.jit(jax.hessian(mean_loss))(x)))
    known = constants(objective)
    if objective.logistic:
        assert known.convexity <= values[0] + 1e-4 and values[-1] <= known.smoothness
        assert values[-1] > known.smoothness / 4
    else:
        np.testing.assert_allclose([values[0], values[-1]], [1, 4], rtol=1e-4)
        np.testing.assert_allclose(known[:2], [1, 4], rtol=1e-6)
    np.testing.assert_allclose(jax.grad(mean_loss)(objective.solution), 0, atol=2e-6)
