"""Strongly convex objectives whose constants are known: quadratics, and logistic regression."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.tasks.data import load
from experiments.tasks.partitions import split

DIMENSION = 64
"""The coordinates of all objectives: those of an image of scikit-learn's digits."""

LEAST, LARGEST = 1.0, 4.0  # The curvatures of the mean of the quadratics.
SPREAD = 0.5  # How far the curvatures of workers are from their mean, relatively.
RIDGE = 0.1
ROW_NORM = 2.0  # The root mean square norm of the inputs of the logistic regression.


class Objective(NamedTuple):
    r"""The losses of all workers, and what their draws need.

    .. math:: f_i(x) = \tfrac12 \sum_j h_{ij} (x_j - b_{ij})^2
              + \frac{l}{m} \sum_k \log(1 + e^{-y_{ik} \langle a_{ik}, x \rangle})

    A quadratic has :math:`l = 0`; for the logistic regression :math:`l = 1`, and the first term is
    the regularization. Both have one type and shape, so one compiled program serves both.
    """

    curvature: np.ndarray  # h, float32[n, d]
    center: np.ndarray  # b, float32[n, d]
    inputs: np.ndarray  # a, float32[n, m, d]
    labels: np.ndarray  # y, float32[n, m], 1 or -1
    logistic: np.ndarray  # l, float32[]
    noise: np.ndarray  # sigma, float32[], the deviation of the noise that is everywhere
    growth: np.ndarray  # rho, float32[], that of the noise relative to the quadratic's gradient
    solution: np.ndarray  # float32[d], the minimum of the mean over workers


class Draw(NamedTuple):
    """What one stochastic gradient of each of k workers is computed from."""

    curvature: jax.Array  # float32[k, d]
    center: jax.Array  # float32[k, d]
    shift: jax.Array  # float32[k, d], added to the gradient
    factor: jax.Array  # float32[k], of the gradient of the quadratic
    inputs: jax.Array  # float32[k, d], one example of each worker
    labels: jax.Array  # float32[k]
    logistic: jax.Array  # float32[k]


def draw(objective: Objective, key: jax.Array) -> Draw:
    """One draw of each worker, from one key, of an objective on the device."""
    workers, count = objective.labels.shape
    row, scale, shift = jax.random.split(key, 3)
    chosen = jax.random.randint(row, (workers,), 0, count)
    zeta = jax.random.normal(scale, (workers,), jnp.float32)
    xi = jax.random.normal(shift, objective.center.shape, jnp.float32)
    each = jnp.arange(workers)
    return Draw(
        curvature=objective.curvature,
        center=objective.center,
        shift=objective.noise / jnp.float32(DIMENSION**0.5) * xi,
        factor=jnp.float32(1) + objective.growth * zeta,
        inputs=objective.inputs[each, chosen],
        labels=objective.labels[each, chosen],
        logistic=jnp.broadcast_to(objective.logistic, (workers,)),
    )


def draw_of(objective: Objective, worker: jax.Array, key: jax.Array) -> Draw:
    """One draw of one worker, with a leading axis of length 1."""
    per_worker = ("curvature", "center", "inputs", "labels")
    rows = {name: getattr(objective, name)[worker][None] for name in per_worker}
    return draw(objective._replace(**rows), key)


def loss(x: jax.Array, batch: Draw) -> jax.Array:
    """The mean of the drawn losses, whose gradient is a stochastic gradient, float32[]."""
    quadratic = 0.5 * jnp.sum(batch.curvature * jnp.square(x[None] - batch.center), axis=1)
    margin = batch.labels * (batch.inputs @ x)
    drawn = batch.factor * quadratic + batch.shift @ x + batch.logistic * jax.nn.softplus(-margin)
    return jnp.mean(drawn)


@functools.cache
def _images() -> tuple[np.ndarray, np.ndarray]:
    """Images of digits whose pixels have mean 0 and equal variances, and the digits."""
    data = load("digits", None)
    images = data.train_inputs.reshape(len(data.train_inputs), -1).astype(np.float64)
    images -= images.mean(axis=0)
    images /= np.maximum(images.std(axis=0), 0.5)  # Of 16 levels; some pixels are nearly constant.
    images *= ROW_NORM / np.mean(np.sum(images**2, axis=1)) ** 0.5
    return images, data.train_labels


@functools.cache
def quadratic(workers: int, noise: float = 1.0, growth: float = 0.5) -> Objective:
    """Quadratics with another curvature and another minimum for each of at least 2 workers.

    The curvatures of their mean go from 1 to 4, for all numbers of workers. At its minimum, the
    mean squared norm of the workers' gradients is 1.
    """
    rng = np.random.default_rng(0)
    relative = rng.uniform(-SPREAD, SPREAD, (workers, DIMENSION))
    relative -= relative.mean(axis=0)
    curvature = np.geomspace(LEAST, LARGEST, DIMENSION) * (1 + relative)
    solution = np.random.default_rng(1).standard_normal(DIMENSION) / DIMENSION**0.5
    gradient = rng.standard_normal((workers, DIMENSION))
    gradient -= gradient.mean(axis=0)
    gradient *= (1 / np.mean(np.sum(gradient**2, axis=1))) ** 0.5
    examples = len(_images()[1]) // workers
    center = solution - gradient / curvature
    inputs, labels = np.zeros((workers, examples, DIMENSION)), np.ones((workers, examples))
    fields = curvature, center, inputs, labels, 0, noise, growth, solution
    return Objective(*map(np.float32, fields))


@functools.cache
def logistic(workers: int) -> Objective:
    """Regularized logistic regression of whether a digit of scikit-learn is below 5.

    Each worker draws its labels from Dirichlet(0.1), so workers differ. One example is drawn per
    gradient. The minimum is Newton's, in float64.
    """
    images, digits = _images()
    examples = len(digits) // workers
    parts = np.stack([part[:examples] for part in split(digits, workers, "skewed", 0)])
    inputs, labels = images[parts], np.where(digits[parts] < 5, 1.0, -1.0)
    rows, solution = inputs.reshape(-1, DIMENSION), np.zeros(DIMENSION)
    for _ in range(20):
        wrong = 1 / (1 + np.exp(labels * (inputs @ solution)))
        second = (wrong * (1 - wrong)).reshape(-1, 1)
        hessian = RIDGE * np.eye(DIMENSION) + rows.T @ (second * rows) / len(rows)
        gradients = -(labels * wrong)[..., None] * inputs
        gradient = RIDGE * solution + gradients.mean(axis=(0, 1))
        solution = solution - np.linalg.solve(hessian, gradient)
    curvature, center = np.full((workers, DIMENSION), RIDGE), np.zeros((workers, DIMENSION))
    fields = curvature, center, inputs, labels, 1, 0, 0, solution
    return Objective(*map(np.float32, fields))


def convexity_and_smoothness(objective: Objective) -> tuple[float, float]:
    r""":math:`\mu` and :math:`L` of the mean over workers; that of logistic losses is a bound.

    A logistic loss curves by at most a quarter of its squared input.
    """
    curvature = np.float64(objective.curvature).mean(axis=0)
    rows = np.float64(objective.inputs).reshape(-1, DIMENSION)
    moments = np.float64(objective.logistic) * rows.T @ rows / len(rows)
    largest = np.linalg.eigvalsh(np.diag(curvature) + moments / 4)[-1]
    return float(curvature.min()), float(largest)


def exact_distances(objective: Objective, rates: np.ndarray, start: np.ndarray) -> np.ndarray:
    r"""The exact :math:`\mathbb{E}\|x^t - x^*\|^2` of synchronous SGD on a quadratic, float64.

    .. math:: x^{t+1} = x^t - \frac{\eta_t}{n} \sum_i g_i(x^t), \qquad
              g_{ij} = (1 + \rho \zeta_i) h_{ij} (x_j - b_{ij}) + \sigma \xi_{ij} / \sqrt d

    Per coordinate, the mean and the variance follow a linear recursion. `start` is float64[d].
    """
    h, b = np.float64(objective.curvature), np.float64(objective.center)
    workers, dimension = h.shape
    noise, growth = float(objective.noise) ** 2 / dimension, float(objective.growth) ** 2
    mean = h.mean(axis=0)
    solution = (h * b).mean(axis=0) / mean
    bias, variance, found = start - solution, np.zeros(dimension), []
    for rate in rates:
        moment = variance + (bias + solution - b) ** 2  # [n, d]
        added = (noise + growth * h**2 * moment).mean(axis=0) / workers
        bias = (1 - rate * mean) * bias
        variance = (1 - rate * mean) ** 2 * variance + rate**2 * added
        found.append(np.sum(bias**2 + variance))
    return np.array(found)
