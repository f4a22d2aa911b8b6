"""The methods written from their papers, in NumPy and float64, with dense matrices.

Each takes x [n, d], updates [steps, n, d] and W [steps, n, n], and returns x after each step.
"""

from collections.abc import Callable, Iterator

import numpy as np


def _all(steps: Iterator[np.ndarray]) -> np.ndarray:
    return np.stack([*steps])


def combine_then_adapt(x: np.ndarray, updates: np.ndarray, weights: np.ndarray) -> np.ndarray:
    def run(x: np.ndarray) -> Iterator[np.ndarray]:
        for update, w in zip(updates, weights, strict=True):
            x = w @ x + update
            yield x

    return _all(run(x.astype(np.float64)))


def adapt_then_combine(x: np.ndarray, updates: np.ndarray, weights: np.ndarray) -> np.ndarray:
    def run(x: np.ndarray) -> Iterator[np.ndarray]:
        for update, w in zip(updates, weights, strict=True):
            x = w @ (x + update)
            yield x

    return _all(run(x.astype(np.float64)))


def d2(x: np.ndarray, updates: np.ndarray, weights: np.ndarray) -> np.ndarray:
    def run(x: np.ndarray) -> Iterator[np.ndarray]:
        older, old_update = None, None
        for update, w in zip(updates, weights, strict=True):
            half = x + update if older is None else 2 * x - older + update - old_update
            older, old_update = x, update
            x = w @ half
            yield x

    return _all(run(x.astype(np.float64)))


def keep_largest(k: int) -> Callable[[np.ndarray], np.ndarray]:
    def keep(x: np.ndarray) -> np.ndarray:
        kept = np.zeros_like(x)
        for row, out in zip(x, kept, strict=True):
            largest = np.argsort(-np.abs(row), kind="stable")[:k]
            out[largest] = row[largest]
        return kept

    return keep


def choco(
    x: np.ndarray, updates: np.ndarray, weights: np.ndarray, *, k: int, step_size: float
) -> np.ndarray:
    """Of one fixed W: everybody's copies are the same."""
    compress = keep_largest(k)

    def run(x: np.ndarray) -> Iterator[np.ndarray]:
        known = np.zeros_like(x)
        for update, w in zip(updates, weights, strict=True):
            half = x + update
            known = known + compress(half - known)
            x = half + step_size * (w @ known - known)
            yield x

    return _all(run(x.astype(np.float64)))


def choco_by_neighbour(
    x: np.ndarray, updates: np.ndarray, weights: np.ndarray, *, k: int, step_size: float
) -> np.ndarray:
    """Each pair has copies of its own, which change when the two talk."""
    compress = keep_largest(k)
    n = len(x)

    def run(x: np.ndarray) -> Iterator[np.ndarray]:
        told = np.zeros((n, n, x.shape[1]))  # [i, j]: what i has told j.
        for update, w in zip(updates, weights, strict=True):
            half = x + update
            talks = (w != 0) & ~np.eye(n, dtype=bool)
            for i, j in np.argwhere(talks):
                told[i, j] += compress((half[i] - told[i, j])[None])[0]
            x = half.copy()
            for i, j in np.argwhere(talks):
                x[i] += step_size * w[i, j] * (told[j, i] - told[i, j])
            yield x

    return _all(run(x.astype(np.float64)))


def deep_squeeze(
    x: np.ndarray, updates: np.ndarray, weights: np.ndarray, *, k: int, step_size: float
) -> np.ndarray:
    compress = keep_largest(k)

    def run(x: np.ndarray) -> Iterator[np.ndarray]:
        residual = np.zeros_like(x)
        for update, w in zip(updates, weights, strict=True):
            corrected = x + update + residual
            sent = compress(corrected)
            residual = corrected - sent
            x = x + update + step_size * (w @ sent - sent)
            yield x

    return _all(run(x.astype(np.float64)))


def push(x: np.ndarray, updates: np.ndarray, weights: np.ndarray, *, delay: int = 0) -> np.ndarray:
    """Shares kept at once, those sent `delay` steps later; parameters are sums over masses."""

    def run(z: np.ndarray) -> Iterator[np.ndarray]:
        total, mass = z.copy(), np.ones((len(z), 1))
        late = [(np.zeros_like(total), np.zeros_like(mass)) for _ in range(delay)]
        for update, p in zip(updates, weights, strict=True):
            total = total + update
            kept = np.diag(np.diag(p))
            late.append(((p - kept) @ total, (p - kept) @ mass))
            total, mass = kept @ total, kept @ mass
            arrived = late.pop(0)
            total, mass = total + arrived[0], mass + arrived[1]
            yield total / mass

    return _all(run(x.astype(np.float64)))


def late_steps(
    x: np.ndarray, updates: np.ndarray, weights: np.ndarray, *, staleness: int
) -> np.ndarray:
    def run(x: np.ndarray) -> Iterator[np.ndarray]:
        for t, w in enumerate(weights):
            x = w @ x + (updates[t - staleness] if t >= staleness else 0)
            yield x

    return _all(run(x.astype(np.float64)))


def exact_now_and_then(
    x: np.ndarray, updates: np.ndarray, weights: np.ndarray, *, every: int
) -> np.ndarray:
    def run(x: np.ndarray) -> Iterator[np.ndarray]:
        for t, (update, w) in enumerate(zip(updates, weights, strict=True), 1):
            x = w @ x + update
            here = np.count_nonzero(w, axis=1) > 1  # Who hears nobody is absent, or alone.
            if t % every == 0 and here.any():
                x[here] = x[here].mean(axis=0)
            yield x

    return _all(run(x.astype(np.float64)))
