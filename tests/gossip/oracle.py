"""The methods written from their papers, in NumPy and float64, with dense matrices.

Each takes x [n, d], updates [steps, n, d] and W [steps, n, n], and returns x after each step.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Array = np.ndarray
Steps = Iterator[tuple[Array, Array]]  # An update and W.


def _stacked(rule: Callable[..., Iterator[Array]]) -> Callable[..., Array]:
    @functools.wraps(rule)
    def run(x: Array, updates: Array, weights: Array, **options: Any) -> Array:
        steps = zip(updates, weights, strict=True)
        return np.stack([*rule(x.astype(np.float64), steps, **options)])

    return run


@_stacked
def combine_then_adapt(x: Array, steps: Steps) -> Iterator[Array]:
    for update, w in steps:
        x = w @ x + update
        yield x


@_stacked
def adapt_then_combine(x: Array, steps: Steps) -> Iterator[Array]:
    for update, w in steps:
        x = w @ (x + update)
        yield x


@_stacked
def d2(x: Array, steps: Steps) -> Iterator[Array]:
    older, old_update = None, None
    for update, w in steps:
        half = x + update if older is None else 2 * x - older + update - old_update
        older, old_update = x, update
        x = w @ half
        yield x


def keep_largest(x: Array, k: int) -> Array:
    kept = np.zeros_like(x)
    for row, out in zip(x, kept, strict=True):
        largest = np.argsort(-np.abs(row), kind="stable")[:k]
        out[largest] = row[largest]
    return kept


@_stacked
def choco(x: Array, steps: Steps, *, k: int, step_size: float) -> Iterator[Array]:
    """Of one fixed W: the copies of all workers are the same."""
    known = np.zeros_like(x)
    for update, w in steps:
        half = x + update
        known = known + keep_largest(half - known, k)
        x = half + step_size * (w @ known - known)
        yield x


@_stacked
def choco_by_neighbor(x: Array, steps: Steps, *, k: int, step_size: float) -> Iterator[Array]:
    """Each pair has copies of its own, which change when the two communicate."""
    n = len(x)
    copies = np.zeros((n, n, x.shape[1]))  # [i, j]: what i has sent to j.
    for update, w in steps:
        half = x + update
        links = (w != 0) & ~np.eye(n, dtype=bool)
        for i, j in np.argwhere(links):
            copies[i, j] += keep_largest((half[i] - copies[i, j])[None], k)[0]
        x = half.copy()
        for i, j in np.argwhere(links):
            x[i] += step_size * w[i, j] * (copies[j, i] - copies[i, j])
        yield x


@_stacked
def deep_squeeze(x: Array, steps: Steps, *, k: int, step_size: float) -> Iterator[Array]:
    residual = np.zeros_like(x)
    for update, w in steps:
        corrected = x + update + residual
        sent = keep_largest(corrected, k)
        residual = corrected - sent
        x = x + update + step_size * (w @ sent - sent)
        yield x


@_stacked
def push(z: Array, steps: Steps, *, delay: int = 0) -> Iterator[Array]:
    """Shares kept at once, those sent `delay` steps later; parameters are sums over masses."""
    total, mass = z.copy(), np.ones((len(z), 1))
    late = [(np.zeros_like(total), np.zeros_like(mass)) for _ in range(delay)]
    for update, p in steps:
        total = total + update
        kept = np.diag(np.diag(p))
        late.append(((p - kept) @ total, (p - kept) @ mass))
        arrived = late.pop(0)
        total, mass = kept @ total + arrived[0], kept @ mass + arrived[1]
        yield total / mass


@_stacked
def late_steps(x: Array, steps: Steps, *, staleness: int) -> Iterator[Array]:
    late = [np.zeros_like(x)] * staleness
    for update, w in steps:
        late.append(update)
        x = w @ x + late.pop(0)
        yield x


@_stacked
def exact_now_and_then(x: Array, steps: Steps, *, every: int) -> Iterator[Array]:
    for t, (update, w) in enumerate(steps, 1):
        x = w @ x + update
        here = np.count_nonzero(w, axis=1) > 1  # Without neighbors, a worker is absent or alone.
        if t % every == 0 and here.any():
            x[here] = x[here].mean(axis=0)
        yield x
