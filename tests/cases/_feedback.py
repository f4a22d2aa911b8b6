"""Rows of wrappers of codecs: feedback, shifts, momentum, clipping."""

from functools import cache

import numpy as np

import jaxcomm
from jaxcomm.compression import scaled
from jaxcomm.compression.feedback import (
    diana,
    ecq,
    ef21,
    error_feedback,
    local_clip,
    momentum_correction,
)
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import top_k
from tests.cases._case import COMMON_NOISE, LARGEST_OF_ALL, Case, Sizes, all_reduce
from tests.cases._sparse import top_quarter


def _gathered_top_quarter(name: str, codec: jaxcomm.Codec) -> Case:
    """A row of a wrapper of top-k, which sends the bytes of top-k."""
    return Case(
        name,
        cache(
            lambda axis_name="data", seed=0: jaxcomm.all_gather_mean(
                codec, seed=seed, axis_name=axis_name
            )
        ),
        bytes=lambda sizes, n: (n - 1) * (top_quarter(sum(sizes)) + 4),
        dtypes=lambda n: {"u32"},
        unbiased=False,
        variance=None,
        random=False,
        codec=codec,
        alien=LARGEST_OF_ALL,
    )


def _levels(n: int) -> int:
    """The most levels whose sum over n workers fits in 8 bits."""
    return 255 // (2 * n)


def _bytes_of_8_bits(sizes: Sizes, n: int) -> float:
    return all_reduce(sum(sizes) + 4 + 4, n)


def _summed_8_bits(name: str, codec: jaxcomm.Codec, **claims: object) -> Case:
    """A row of a wrapper of dithering, which sends the bytes of dithering."""
    return Case(
        name,
        cache(
            lambda axis_name="data", seed=0: jaxcomm.all_reduce_mean(
                codec, seed=seed, axis_name=axis_name
            )
        ),
        bytes=_bytes_of_8_bits,
        dtypes=lambda n: {"s8"},
        codec=codec,
        **{"unbiased": False, "variance": None, "alien": COMMON_NOISE} | claims,
    )


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
    _gathered_top_quarter("ef21", ef21(top_k(ratio=0.25)))._replace(settles=True),
    _summed_8_bits(
        "diana",
        diana(dither(bits=8)),
        unbiased=True,
        # For the first step; later ones quantize the difference from the shift, which is smaller.
        variance=lambda d, n: min(d / _levels(n) ** 2, (d / n) ** 0.5 / _levels(n)),
        resolution=lambda n, d: 1 / _levels(n),
        settles=True,
        staged=False,
    ),
    _summed_8_bits("ecq", ecq(dither(bits=8)))._replace(
        make=cache(
            lambda axis_name="data", seed=0: jaxcomm.all_gather_mean(
                ecq(dither(bits=8)), seed=seed, axis_name=axis_name
            )
        ),
        bytes=lambda sizes, n: (n - 1) * (sum(sizes) + 4 + 4),
        dtypes=lambda n: {"u8"},
        feedback=True,
        discount=0.9,
    ),
    _summed_8_bits(
        "error_feedback_dither",
        error_feedback(scaled(dither(bits=8))),
        compressor=scaled(dither(bits=8)),
        contraction=lambda d: 1 / (1 + min(d / 127**2, d**0.5 / 127)),
        feedback=True,
    ),
    _gathered_top_quarter(
        "momentum_correction", momentum_correction(error_feedback(top_k(ratio=0.25)))
    )._replace(aim=lambda updates: momentum_corrected(updates, 0.25)),
    _gathered_top_quarter(
        "local_clip", local_clip(error_feedback(top_k(ratio=0.25)), 1.0)
    )._replace(aim=lambda updates: clipped(updates, 1.0).mean(axis=1)),
]
