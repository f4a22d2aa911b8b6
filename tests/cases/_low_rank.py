"""Rows of low-rank methods.

from tests.cases._case import row
Most units of the laws are vectors, which low-rank codecs send exactly. So there are two rows of
each method: one with the leaves in their shapes, and one in which each unit is laid out as a matrix
of `COLUMNS` columns, padded with zeros.
"""

import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomm import Codec, all_gather_mean, all_reduce_mean
from jaxcomm.aggregation._warmup import in_stages
from jaxcomm.catalogue import METHODS, TINY
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.low_rank import projection
from jaxcomm.compression.quantizers import dither
from tests.cases._case import Case, Sizes, all_reduce, row
from tests.low_rank import atomo_probabilities, dion, of_matrices

COLUMNS = 3
KERNEL = (5, 2)  # The only leaf of the laws of bytes that has two axes.


def laid_out(x: np.ndarray) -> np.ndarray:
    return np.pad(x, (0, -x.size % COLUMNS)).reshape(-1, COLUMNS)


def padded(size: int) -> int:
    return -(-size // COLUMNS) * COLUMNS


def factors(rows: int, columns: int, left: int, right: int) -> int:
    """The numbers of the factors; 0 if a matrix of that shape is sent exactly."""
    most = left * rows + right * columns
    return most if most < rows * columns else 0


def power_sgd_numbers(size: int) -> int:
    """Of a unit that is laid out: one left column, and two right ones with the drawn one."""
    return factors(padded(size) // COLUMNS, COLUMNS, 1, 2) or padded(size)


def power_sgd_leaves(sizes: Sizes) -> int:
    kernel = factors(*KERNEL, 1, 2)
    return sum(kernel if size == math.prod(KERNEL) else size for size in sizes)


def dion_numbers(sizes: Sizes) -> int:
    kernel = factors(*KERNEL, 1, 1)
    return sum(kernel if size == math.prod(KERNEL) else size for size in sizes)


def dion_of_squares(updates: np.ndarray) -> np.ndarray:
    side = math.isqrt(updates.shape[-1])
    return dion(updates.mean(axis=1).reshape(-1, side, side), 1).reshape(len(updates), -1)


def power_iteration_moment(x: np.ndarray) -> float:
    """The drawn direction is uniform in the space that is orthogonal to the left factor."""
    matrix = laid_out(x)
    if not factors(*matrix.shape, 1, 2):
        return 0.0
    key = jax.random.key(0, impl="threefry2x32")
    left = matrix @ np.asarray(jax.random.normal(key, (COLUMNS, 1), jnp.float32), np.float64)
    norm = np.linalg.norm(left)
    found = np.sum((left.T @ matrix) ** 2) / norm**2 if norm else 0.0
    return float(np.sum(x**2) - found) * (1 - 1 / (len(matrix) - 1))


def projection_numbers(size: int) -> int:
    """Of a unit that is laid out, in a step of the right side: one column and the drawn one."""
    rows = padded(size) // COLUMNS
    return 2 * rows if 2 * max(rows, COLUMNS) < rows * COLUMNS else padded(size)


def projection_moment(x: np.ndarray) -> float:
    """The drawn direction is uniform in the space that is orthogonal to the known one."""
    matrix = laid_out(x)
    if 2 * max(matrix.shape) >= matrix.size:
        return 0.0
    key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), 1)
    right = np.asarray(jax.random.normal(key, (COLUMNS, 1), jnp.float32), np.float64)
    found = np.sum((matrix @ right) ** 2) / np.sum(right**2)
    return float(np.sum(x**2) - found) * (1 - 1 / (COLUMNS - 1))


def _laid_out(case: Case, columns: int, build: Any = None) -> Case:
    """The row of units that are laid out as matrices, since most leaves of the laws are vectors."""
    method = METHODS[case.name]
    codec = of_matrices(method.codec(TINY), columns)
    whole = method.feedback(codec) if method.feedback else codec
    aggregator = all_gather_mean if method.exchange == "all-gather" else all_reduce_mean
    build = build or (lambda **options: aggregator(whole, **options))
    return case._replace(
        make=cache(lambda axis_name="data", seed=0: build(axis_name=axis_name, seed=seed)),
        codec=whole,
        compressor=codec,
    )


def _in_turn(factor_codec: Codec | None = None) -> Any:
    """The aggregator of `power_sgd(alternate=True)`, of units that are laid out."""

    def build(**options: Any) -> optax.GradientTransformationExtraArgs:
        sides = [projection(1, side, factor_codec=factor_codec) for side in ("right", "left")]
        codecs = [error_feedback(of_matrices(side, COLUMNS)) for side in sides]
        stages = [all_reduce_mean(codec, **options) for codec in codecs]
        return in_stages(stages, lambda step: step % 2, "power_sgd")

    return build


def coded_bytes(size: int) -> int:
    """Of a unit that is laid out: 16 bits per number of the factor, and the largest magnitude."""
    numbers = projection_numbers(size)
    return 4 * numbers if numbers == padded(size) else 4 * -(-numbers // 2) + 4


def atomo_numbers(shape: tuple[int, int]) -> int:
    return factors(*shape, 1, 1) or math.prod(shape)


def atomo_leaves(sizes: Sizes) -> int:
    kernel = atomo_numbers(KERNEL)
    return sum(kernel if size == math.prod(KERNEL) else size for size in sizes)


def atomo_moment(x: np.ndarray) -> float:
    """Components are orthogonal, so the variance is the sum of theirs."""
    matrix = np.pad(x, (0, x.size % 2)).reshape(-1, 2)
    if not factors(*matrix.shape, 1, 1):
        return 0.0
    values = np.linalg.svd(matrix, compute_uv=False)
    p = atomo_probabilities(values, 1)
    return float(sum(values[p > 0] ** 2 / p[p > 0]) - sum(x**2))


LOW_RANK = [
    row(
        "atomo",
        bytes=lambda sizes, n: (n - 1) * (4 * atomo_leaves(sizes) + 4),
        # Probabilities are multiples of 2**-31, or a part in a million smaller.
        variance=lambda d, n: (max(d**0.5, 1) * (1 + 1e-5) - 1) / n,
        # What is sent is at most the sum of two singular values in magnitude.
        resolution=lambda n, d: 1 + (2 * d) ** 0.5,
        fitted=True,
        spreads=True,
    ),
    _laid_out(
        row(
            "spectral_sampling",
            bytes=lambda sizes, n: (
                (n - 1) * (4 * sum(atomo_numbers((-(-size // 2), 2)) for size in sizes) + 4)
            ),
            variance=lambda d, n: (max(d**0.5, 1) * (1 + 1e-5) - 1) / n,
            resolution=lambda n, d: 1 + (2 * d) ** 0.5,
            moment=atomo_moment,
            fitted=True,
            spreads=True,
        ),
        2,
    ),
    row(
        "dion",
        bytes=lambda sizes, n: all_reduce(4 * dion_numbers(sizes) + 4, n),
        dtypes="float32",
        random=False,
        aim=dion_of_squares,
    ),
    row(
        "power_sgd",
        bytes=lambda sizes, n: all_reduce(4 * power_sgd_leaves(sizes) + 4, n),
        dtypes="float32",
        common_draws=True,
    ),
    _laid_out(
        row(
            "power_sgd_alternate",
            bytes=lambda sizes, n: all_reduce(4 * sum(map(projection_numbers, sizes)), n),
            dtypes="float32",
            contraction=lambda d: 1 / d,
            moment=projection_moment,
            common_draws=True,
        ),
        COLUMNS,
        _in_turn(),
    ),
    _laid_out(
        row(
            "power_sgd_factor_codec",
            bytes=lambda sizes, n: all_reduce(sum(map(coded_bytes, sizes)) + 4, n),
            contraction=lambda d: 1 / (2 * d**2),
        ),
        COLUMNS,
        _in_turn(dither(bits=16)),
    ),
    _laid_out(
        row(
            "power_iteration",
            bytes=lambda sizes, n: all_reduce(4 * sum(map(power_sgd_numbers, sizes)) + 4, n),
            dtypes="float32",
            contraction=lambda d: 1 / d,
            moment=power_iteration_moment,
            common_draws=True,
        ),
        COLUMNS,
    ),
]
