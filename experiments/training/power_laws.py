"""Exponents of power laws, fitted to measured points."""

import math
from collections.abc import Sequence

import numpy as np


def fit_exponent(x: Sequence[float], y: Sequence[float]) -> float:
    r"""The exponent :math:`a` of :math:`y \approx c\, x^a`, by least squares of logarithms.

    It is infinite if a value is not finite: the run diverged. It is NaN for fewer than two
    different `x`.

    Example:
      >>> fit_exponent([1, 2, 4], [8.0, 4.0, 2.0])
      -1.0
    """
    if not all(map(math.isfinite, y)):
        return math.inf
    if len({*x}) < 2 or min(y) <= 0:
        return math.nan
    across, up = np.log(np.asarray(x, np.float64)), np.log(np.asarray(y, np.float64))
    across -= across.mean()
    return float(across @ up / (across @ across))


def binned(x: np.ndarray, y: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """The means of `x` and `y` in intervals that are equally long on a logarithmic axis.

    A fit of points at equal distances would mostly be one of the end of the run. Empty intervals
    are skipped.
    """
    edges = np.geomspace(x[0], x[-1], bins + 1)
    number = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, bins - 1)
    used = np.unique(number)
    return tuple(np.array([each[number == n].mean() for n in used]) for each in (x, y))
