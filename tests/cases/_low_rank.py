"""Rows of low-rank methods.

Most units of the laws are vectors, which low-rank codecs send exactly. So there are two rows of
each method: one with the leaves in their shapes, and one in which each unit is laid out as a matrix
of `COLUMNS` columns, padded with zeros.
"""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomm
from jaxcomm import Codec
from jaxcomm.aggregation._warmup import in_stages
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.low_rank import power_iteration, projection, spectral_sampling
from jaxcomm.compression.quantizers import dither
from tests.cases._case import Case, Sizes, all_reduce
from tests.low_rank import atomo_probabilities, of_matrices

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


_SIDES = [of_matrices(projection(1, side), COLUMNS) for side in ("right", "left")]
_CODED_SIDES = [
    of_matrices(projection(1, side, factor_codec=dither(bits=16)), COLUMNS)
    for side in ("right", "left")
]
_MATRICES = of_matrices(power_iteration(1), COLUMNS)


def in_turn(sides: list[Codec], axis_name: str, seed: int) -> optax.GradientTransformationExtraArgs:
    """The aggregator of `power_sgd(alternate=True)`, of other codecs."""
    stages = [
        jaxcomm.all_reduce_mean(error_feedback(side), seed=seed, axis_name=axis_name)
        for side in sides
    ]
    return in_stages(stages, lambda step: step % 2, "power_sgd")


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


_PAIRS = of_matrices(spectral_sampling(1), 2)  # Matrices of two columns and two components.

LOW_RANK = [
    Case(
        "atomo",
        cache(lambda axis_name="data", seed=0: jaxcomm.atomo(axis_name, rank=1, seed=seed)),
        bytes=lambda sizes, n: (n - 1) * (4 * atomo_leaves(sizes) + 4),
        dtypes=lambda n: {"u32"},
        unbiased=True,
        # Probabilities are multiples of 2**-31, or a part in a million smaller.
        variance=lambda d, n: (max(d**0.5, 1) * (1 + 1e-5) - 1) / n,
        # What is sent is at most the sum of two singular values in magnitude.
        resolution=lambda n, d: 1 + (2 * d) ** 0.5,
        codec=spectral_sampling(1),
        fitted=True,
        spreads=True,
    ),
    Case(
        "spectral_sampling",
        cache(
            lambda axis_name="data", seed=0: jaxcomm.all_gather_mean(
                _PAIRS, seed=seed, axis_name=axis_name
            )
        ),
        bytes=lambda sizes, n: (
            (n - 1) * (4 * sum(atomo_numbers((-(-size // 2), 2)) for size in sizes) + 4)
        ),
        dtypes=lambda n: {"u32"},
        unbiased=True,
        variance=lambda d, n: (max(d**0.5, 1) * (1 + 1e-5) - 1) / n,
        resolution=lambda n, d: 1 + (2 * d) ** 0.5,
        codec=_PAIRS,
        compressor=_PAIRS,
        moment=atomo_moment,
        fitted=True,
        spreads=True,
    ),
    Case(
        "power_sgd",
        cache(lambda axis_name="data", seed=0: jaxcomm.power_sgd(axis_name, rank=1, seed=seed)),
        bytes=lambda sizes, n: all_reduce(4 * power_sgd_leaves(sizes) + 4, n),
        dtypes=lambda n: {"f32"},
        unbiased=False,
        variance=None,
        codec=error_feedback(power_iteration(1)),
        feedback=True,
        common_coins=True,
    ),
    Case(
        "power_sgd_alternate",
        cache(lambda axis_name="data", seed=0: in_turn(_SIDES, axis_name, seed)),
        bytes=lambda sizes, n: all_reduce(4 * sum(map(projection_numbers, sizes)), n),
        dtypes=lambda n: {"f32"},
        unbiased=False,
        variance=None,
        codec=error_feedback(_SIDES[0]),
        compressor=_SIDES[0],
        contraction=lambda d: 1 / d,
        moment=projection_moment,
        feedback=True,
        common_coins=True,
    ),
    Case(
        "power_sgd_factor_codec",
        cache(lambda axis_name="data", seed=0: in_turn(_CODED_SIDES, axis_name, seed)),
        bytes=lambda sizes, n: all_reduce(sum(map(coded_bytes, sizes)) + 4, n),
        dtypes=lambda n: {"u32"},
        unbiased=False,
        variance=None,
        codec=error_feedback(_CODED_SIDES[0]),
        compressor=_CODED_SIDES[0],
        contraction=lambda d: 1 / (2 * d**2),
        feedback=True,
    ),
    Case(
        "power_iteration",
        cache(
            lambda axis_name="data", seed=0: jaxcomm.all_reduce_mean(
                error_feedback(_MATRICES), seed=seed, axis_name=axis_name
            )
        ),
        bytes=lambda sizes, n: all_reduce(4 * sum(map(power_sgd_numbers, sizes)) + 4, n),
        dtypes=lambda n: {"f32"},
        unbiased=False,
        variance=None,
        codec=error_feedback(_MATRICES),
        compressor=_MATRICES,
        contraction=lambda d: 1 / d,
        moment=power_iteration_moment,
        feedback=True,
        common_coins=True,
    ),
]
