"""Rows of wrappers of codecs: feedback, shifts, momentum, clipping."""

from typing import Any

import numpy as np

from tests.cases._case import COMMON_NOISE, LARGEST_OF_ALL, Case, Sizes, all_reduce, row
from tests.cases._sparse import top_quarter


def _gathered_top_quarter(name: str, **claims: Any) -> Case:
    """A row of a wrapper of top-k, which sends the bytes of top-k."""
    return row(
        name,
        bytes=lambda sizes, n: (n - 1) * (top_quarter(sum(sizes)) + 4),
        random=False,
        alien=LARGEST_OF_ALL,
        **claims,
    )


def _levels(n: int) -> int:
    """The most levels whose sum over n workers fits in 8 bits."""
    return 255 // (2 * n)


def _bytes_of_8_bits(sizes: Sizes, n: int) -> float:
    return all_reduce(sum(sizes) + 4 + 4, n)


def clipped(updates: np.ndarray, most: float) -> np.ndarray:
    """[steps, n, d], each worker's update clipped by its norm."""
    norms = np.linalg.norm(updates, axis=-1, keepdims=True)
    return updates * np.minimum(1, most / norms)


def momentum_corrected(updates: np.ndarray, ratio: float) -> np.ndarray:
    """Lin et al.'s algorithm with exact top-k and a momentum of 0.9, [steps, d]."""
    velocity, residual, means = np.zeros_like(updates[0]), np.zeros_like(updates[0]), []
    most = round(ratio * velocity.shape[1])
    for update in updates:
        velocity = 0.9 * velocity + update
        residual = residual + velocity
        least = -np.sort(-np.abs(residual), axis=1)[:, most - 1 : most]
        sent = np.where(np.abs(residual) >= least, residual, 0)
        velocity, residual = np.where(sent, 0, velocity), residual - sent
        means.append(sent.mean(axis=0))
    return np.stack(means)


FEEDBACK = [
    _gathered_top_quarter("ef21", converges=True),
    row(
        "diana",
        bytes=_bytes_of_8_bits,
        dtypes="int8",
        # For the first step; later ones quantize the difference from the shift, which is smaller.
        variance=lambda d, n: min(d / _levels(n) ** 2, (d / n) ** 0.5 / _levels(n)),
        resolution=lambda n, d: 1 / _levels(n),
        converges=True,
        staged=False,
        alien=COMMON_NOISE,
    ),
    row(
        "ecq",
        bytes=lambda sizes, n: (n - 1) * (sum(sizes) + 4 + 4),
        dtypes="uint8",
        feedback=True,
        discount=0.9,
        alien=COMMON_NOISE,
    ),
    row(
        "error_feedback_dither",
        bytes=_bytes_of_8_bits,
        dtypes="int8",
        contraction=lambda d: 1 / (1 + min(d / 127**2, d**0.5 / 127)),
        alien=COMMON_NOISE,
    ),
    _gathered_top_quarter(
        "momentum_correction", aim=lambda updates: momentum_corrected(updates, 0.25)
    ),
    _gathered_top_quarter("local_clip", aim=lambda updates: clipped(updates, 1.0).mean(axis=1)),
]
