"""The exact mean squared distance of SGD on quadratics, in closed recursions in float64."""

from collections.abc import Callable

import numpy as np

from experiments.tasks.objectives import Objective


def exact_distances(
    objective: Objective,
    rates: np.ndarray,
    start: np.ndarray,
    mixing: Callable[[int], np.ndarray],
    *,
    combines_first: bool = False,
) -> np.ndarray:
    r"""The exact :math:`\mathbb{E}\|\bar x^t - x^*\|^2` after each step of a linear method.

    .. math:: x^{t+1} = W_t (x^t - \eta_t g(x^t)), \qquad
              g_{ij} = (1 + \rho \zeta_i) h_{ij} (x_{ij} - b_{ij}) + \sigma \xi_{ij} / \sqrt d

    Per coordinate, the mean and the covariance over workers follow a linear recursion:
    :math:`m \gets W (m - \eta h (m - b))` and :math:`C \gets W (A C A^\top + D) W^\top` with
    :math:`A = I - \eta\, \mathrm{diag}(h)` and the diagonal :math:`D` of the variances of
    :math:`\eta g`. The mean over workers is :math:`W = 1 1^\top / n`, and local steps have
    :math:`W = I`.

    Args:
      objective: A quadratic.
      rates: :math:`\eta_t`, [steps].
      start: [d], the same on all workers.
      mixing: :math:`t \mapsto W_t`, [n, n].
      combines_first: Whether :math:`W_t` applies to :math:`x^t` only, and not to the step.

    Returns:
      float64[steps].
    """
    h = np.asarray(objective.curvature, np.float64).T  # [d, n]
    b = np.asarray(objective.center, np.float64).T
    noise, growth = float(objective.noise) ** 2 / len(h), float(objective.growth) ** 2
    solution = np.sum(h * b, axis=1) / np.sum(h, axis=1)
    dimension, workers = h.shape
    center = np.repeat(np.asarray(start, np.float64)[:, None], workers, axis=1)
    covariance = np.zeros((dimension, workers, workers))
    found = []
    for step, rate in enumerate(rates):
        weights = mixing(step)
        second = np.diagonal(covariance, axis1=1, axis2=2) + (center - b) ** 2
        variances = rate**2 * (noise + growth * h**2 * second)
        own = np.einsum("dn,nm->dnm", variances, np.eye(workers))
        local = np.eye(workers) - rate * np.einsum("dn,nm->dnm", h, np.eye(workers))
        if combines_first:
            map_ = weights - np.eye(workers) + local
            center = np.einsum("nm,dm->dn", weights, center) - rate * h * (center - b)
            covariance = map_ @ covariance @ map_.transpose(0, 2, 1) + own
        else:
            center = np.einsum("nm,dm->dn", weights, center - rate * h * (center - b))
            covariance = weights @ (local @ covariance @ local + own) @ weights.T
        bias = center.mean(axis=1) - solution
        found.append(np.sum(bias**2 + covariance.mean(axis=(1, 2))))
    return np.array(found)


def exact_distances_of_mean(
    objective: Objective, rates: np.ndarray, start: np.ndarray
) -> np.ndarray:
    """`exact_distances` of synchronous SGD, by two numbers per coordinate instead of n squared."""
    h = np.asarray(objective.curvature, np.float64)
    b = np.asarray(objective.center, np.float64)
    workers, dimension = h.shape
    noise, growth = float(objective.noise) ** 2 / dimension, float(objective.growth) ** 2
    mean = h.mean(axis=0)
    solution = (h * b).mean(axis=0) / mean
    first, variance = np.asarray(start, np.float64) - solution, np.zeros(dimension)
    found = []
    for rate in rates:
        moment = variance + (first + solution - b) ** 2  # [n, d]
        added = (noise + growth * h**2 * moment).mean(axis=0) / workers
        first = (1 - rate * mean) * first
        variance = (1 - rate * mean) ** 2 * variance + rate**2 * added
        found.append(np.sum(first**2 + variance))
    return np.array(found)
