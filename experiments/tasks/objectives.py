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


class Constants(NamedTuple):
    r"""The constants in which bounds are stated.

    Attributes:
      convexity: :math:`\mu`, of the mean over workers.
      smoothness: :math:`L`, of the mean over workers.
      variance: :math:`\frac1n \sum_i \mathbb{E}\|g_i - \nabla f_i\|^2` at the minimum.
      growth: :math:`\rho^2`, by which the variance of a worker exceeds :math:`\sigma^2` per squared
        norm of the gradient of its quadratic.
      dissimilarity: :math:`\frac1n \sum_i \|\nabla f_i\|^2` at the minimum.
    """

    convexity: float
    smoothness: float
    variance: float
    growth: float
    dissimilarity: float


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
    """One draw of each worker, from one key."""
    workers, count = objective.labels.shape
    row, scale, shift = jax.random.split(key, 3)
    chosen = jax.random.randint(row, (workers,), 0, count)
    zeta = jax.random.normal(scale, (workers,), jnp.float32)
    xi = jax.random.normal(shift, objective.center.shape, jnp.float32)
    each = jnp.arange(workers)
    return Draw(
        curvature=jnp.asarray(objective.curvature),
        center=jnp.asarray(objective.center),
        shift=objective.noise / jnp.float32(objective.center.shape[1] ** 0.5) * xi,
        factor=jnp.float32(1) + objective.growth * zeta,
        inputs=jnp.asarray(objective.inputs)[each, chosen],
        labels=jnp.asarray(objective.labels)[each, chosen],
        logistic=jnp.broadcast_to(objective.logistic, (workers,)),
    )


def draw_of(objective: Objective, worker: jax.Array, key: jax.Array) -> Draw:
    """One draw of one worker, with a leading axis of length 1."""
    per_worker = ("curvature", "center", "inputs", "labels")
    rows = {name: jnp.asarray(getattr(objective, name))[worker][None] for name in per_worker}
    return draw(objective._replace(**rows), key)


def loss(x: jax.Array, batch: Draw) -> jax.Array:
    """The mean of the drawn losses, whose gradient is a stochastic gradient, float32[]."""
    offset = x[None] - batch.center
    quadratic = 0.5 * jnp.sum(batch.curvature * jnp.square(offset), axis=1)
    margin = batch.labels * (batch.inputs @ x)
    drawn = batch.factor * quadratic + batch.shift @ x + batch.logistic * jax.nn.softplus(-margin)
    return jnp.mean(drawn)


@functools.cache
def quadratic(
    workers: int, noise: float = 1.0, growth: float = 0.5, dissimilarity: float = 1.0
) -> Objective:
    r"""Quadratics of all workers, with another curvature and another minimum for each.

    The curvatures of their mean go from :math:`\mu = 1` to :math:`L = 4`. They are the same for all
    numbers of workers, as are the variance and the dissimilarity at the minimum of the mean.

    Args:
      workers: n, at least 2.
      noise: :math:`\sigma`.
      growth: :math:`\rho`.
      dissimilarity: :math:`\zeta^2`, the mean squared norm of the workers' gradients there.
    """
    rng = np.random.default_rng(0)
    mean = np.geomspace(LEAST, LARGEST, DIMENSION)
    relative = rng.uniform(-SPREAD, SPREAD, (workers, DIMENSION))
    relative -= relative.mean(axis=0)
    curvature = mean * (1 + relative)
    solution = np.random.default_rng(1).standard_normal(DIMENSION) / DIMENSION**0.5
    gradient = rng.standard_normal((workers, DIMENSION))
    gradient -= gradient.mean(axis=0)
    gradient *= (dissimilarity / np.mean(np.sum(gradient**2, axis=1))) ** 0.5
    return Objective(
        curvature=np.float32(curvature),
        center=np.float32(solution - gradient / curvature),
        inputs=np.zeros((workers, examples_of(workers), DIMENSION), np.float32),
        labels=np.ones((workers, examples_of(workers)), np.float32),
        logistic=np.float32(0),
        noise=np.float32(noise),
        growth=np.float32(growth),
        solution=np.float32(solution),
    )


@functools.cache
def _images() -> tuple[np.ndarray, np.ndarray]:
    """Images of digits whose pixels have mean 0 and equal variances, and the digits."""
    data = load("digits", None)
    images = data.train_inputs.reshape(len(data.train_inputs), -1).astype(np.float64)
    images -= images.mean(axis=0)
    images /= np.maximum(images.std(axis=0), 0.5)  # Of 16 levels; some pixels are nearly constant.
    images *= ROW_NORM / np.mean(np.sum(images**2, axis=1)) ** 0.5
    return images, data.train_labels


def examples_of(workers: int) -> int:
    """The examples of each worker."""
    return len(_images()[1]) // workers


def logistic_gradients(
    inputs: np.ndarray, labels: np.ndarray, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Of rows in float64: gradients of the logistic losses [..., d], and second derivatives."""
    probability = 1 / (1 + np.exp(labels * (inputs @ x)))
    return -(labels * probability)[..., None] * inputs, probability * (1 - probability)


@functools.cache
def logistic(workers: int) -> Objective:
    """Regularized logistic regression of whether a digit of scikit-learn is below 5.

    Each worker draws its labels from Dirichlet(0.1), so workers differ. One example is drawn per
    gradient. The minimum is Newton's, in float64.

    Args:
      workers: n.
    """
    images, digits = _images()
    each = examples_of(workers)
    parts = np.stack([part[:each] for part in split(digits, workers, "skewed", 0)])
    inputs, labels = images[parts], np.where(digits[parts] < 5, 1.0, -1.0)
    solution = np.zeros(DIMENSION)
    for _ in range(20):
        gradients, second = logistic_gradients(inputs, labels, solution)
        rows = inputs.reshape(-1, DIMENSION)
        hessian = RIDGE * np.eye(DIMENSION) + rows.T @ (second.reshape(-1, 1) * rows) / len(rows)
        gradient = RIDGE * solution + gradients.mean(axis=(0, 1))
        solution = solution - np.linalg.solve(hessian, gradient)
    return Objective(
        curvature=np.full((workers, DIMENSION), RIDGE, np.float32),
        center=np.zeros((workers, DIMENSION), np.float32),
        inputs=np.float32(inputs),
        labels=np.float32(labels),
        logistic=np.float32(1),
        noise=np.float32(0),
        growth=np.float32(0),
        solution=np.float32(solution),
    )


def constants(objective: Objective) -> Constants:
    """The constants of an objective, in closed form; the smoothness of logistic losses is a bound.

    A logistic loss curves by at most a quarter of its squared input.
    """
    h, b, a, y, weight, noise, growth, x = (np.asarray(part, np.float64) for part in objective)
    rows = a.reshape(-1, a.shape[-1])
    moments = weight * rows.T @ rows / len(rows)
    each, _ = logistic_gradients(a, y, x)
    of_workers = h * (x - b) + weight * each.mean(axis=1)
    own = np.sum((h * (x - b)) ** 2, axis=1).mean()
    within = weight * np.mean(np.sum((each - each.mean(axis=1, keepdims=True)) ** 2, axis=-1))
    return Constants(
        convexity=float(h.mean(axis=0).min()),
        smoothness=float(np.linalg.eigvalsh(np.diag(h.mean(axis=0)) + moments / 4)[-1]),
        variance=float(noise**2 + growth**2 * own + within),
        growth=float(growth**2),
        dissimilarity=float(np.mean(np.sum(of_workers**2, axis=1))),
    )
