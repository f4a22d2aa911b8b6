"""Whether workers agree after enough steps of a mixing, from connectivity or the spectrum."""

import functools
from typing import Any

import numpy as np

from jaxcomm.gossip._mixing import Rule
from jaxcomm.gossip._mixing_plan import Mixing
from jaxcomm.gossip._to_mixing import to_mixing

# Above the rounding errors of eigenvalues, and below the gap of a path of 10^5 workers.
_LEAST_GAP = 1e-11


def agreeing(graph: Any, rule: Rule = "metropolis") -> Mixing:
    r"""The mixing of a method: `to_mixing(graph, rule)`, if workers agree after enough steps of it.

    Without updates, all :math:`x_i` then converge to one value. If all weights are at least 0 and
    those of a worker for itself are not 0, they do if every worker hears every other one, directly
    or over others, in any of the steps. Otherwise, with all entries of :math:`J` being :math:`1/n`,

    .. math:: \rho(W_m \cdots W_1 - J) < 1 \text{ (in turn)}, \qquad
              \lambda_{\max}(\mathbb{E}[W^\top W] - J) < 1 \text{ (drawn)}

    Raises:
      ValueError: If they do not agree, or as `to_mixing` does.
    """
    mixing = to_mixing(graph, rule)
    together = mixing
    if mixing.constant:
        changes = sum(matrix - np.eye(mixing.workers) for matrix in mixing.matrices)
        together = Mixing((np.eye(mixing.workers) + changes,))
    used = [m for m, p in zip(together.matrices, together.probabilities, strict=True) if p > 0]
    _require_connected(np.any(np.stack(used) != 0, axis=0))
    averages = [np.min(each) >= 0 and np.min(np.diag(each)) > 0 for each in used]
    if not ((mixing.constant or mixing.exclusive) and all(averages)):
        _require_contraction(together)
    return mixing


def _heard(hears: np.ndarray) -> np.ndarray:
    """Which workers worker 0 hears, directly or over others: bool[n]."""
    found = np.zeros(len(hears), bool)
    newest = np.array([0])
    while newest.size:
        found[newest] = True
        newest = np.flatnonzero(hears[newest].any(axis=0) & ~found)
    return found


def _require_connected(hears: np.ndarray) -> None:
    """Raises unless every worker hears every other one; `hears` is bool[receivers, senders]."""
    for heard in (_heard(hears), _heard(hears.T)):
        if not heard.all():
            some, others = (np.flatnonzero(part)[:8].tolist() for part in (heard, ~heard))
            raise ValueError(
                f"The graph is not connected, over all steps: between workers such as {some} and "
                f"{others}, messages go in no direction, or in one only, so they never agree. Add "
                "links between them; of a list of graphs, all together must be connected."
            )


def _require_contraction(mixing: Mixing) -> None:
    mean = 1 / mixing.workers
    if mixing.constant or mixing.period == len(mixing.matrices) > 1:
        product = functools.reduce(lambda before, matrix: matrix @ before, mixing.matrices)
        rest, symmetric = product - mean, np.allclose(product, product.T)
        spectrum = np.linalg.eigvalsh(rest) if symmetric else np.linalg.eigvals(rest)
        of, largest = "the weights", float(np.max(np.abs(spectrum)))
    else:
        of, largest = "the weights, squared and on average,", mixing.rho
    if largest > 1 - _LEAST_GAP:
        raise ValueError(
            f"Workers do not agree with these weights: besides the 1 of their mean, {of} have an "
            f"eigenvalue of magnitude {largest:.6g}, and it must be below 1. Negative eigenvalues "
            "need larger weights of a worker for itself, as by `gossip.lazy_mixing(mixing)`."
        )
