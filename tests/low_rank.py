"""PowerSGD and ATOMO in NumPy, their inputs, and codecs that lay out vectors as matrices."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import Codec, Context


def of_matrices(codec: Codec, columns: int) -> Codec:
    """The codec of units that are laid out as matrices, whatever their shapes."""

    def matrix(x: jax.Array) -> jax.Array:
        return jnp.pad(x.ravel(), (0, -x.size % columns)).reshape(-1, columns)

    def unit(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return x.ravel()[: math.prod(shape)].reshape(shape)

    def inside(context: Context) -> Context:
        return context.replace(shape=(-(-math.prod(context.shape) // columns), columns))

    def finalize(context: Context, payload: Any, mean: jax.Array) -> Any:
        update, memory = codec.finalize(inside(context), payload, matrix(mean))
        return unit(update, mean.shape), memory

    return codec.replace(
        init=lambda x: codec.init(matrix(x)),
        measure=lambda context, x: codec.measure(inside(context), matrix(x)),
        encode=lambda context, x: codec.encode(inside(context), matrix(x)),
        decode=lambda context, payload: unit(codec.decode(inside(context), payload), context.shape),
        finalize=finalize,
        fast=codec.fast._replace(factors=None),
    )


@functools.cache
def updates(shape: tuple[int, ...], steps: int = 5, workers: int = 3) -> np.ndarray:
    """A common part and local parts, [steps, workers, *shape]."""
    rng = np.random.default_rng(0)
    common = rng.normal(size=(1, 1, *shape))
    return np.asarray(common + rng.normal(size=(steps, workers, *shape)), np.float32)


def power_sgd(updates: np.ndarray, q: np.ndarray, *, feedback: bool) -> list[np.ndarray]:
    """Algorithms 1 and 2 of Vogels et al., of `updates` [steps, workers, rows, columns]."""
    residuals, means = np.zeros_like(updates[0]), []
    for matrices in updates:
        inputs = matrices + residuals
        basis, _ = np.linalg.qr(np.mean([m @ q for m in inputs], axis=0))
        right = [m.T @ basis for m in inputs]
        if feedback:
            residuals = np.stack([m - basis @ q.T for m, q in zip(inputs, right, strict=True)])
        q = np.mean(right, axis=0)
        means.append(basis @ q.T)
    return means


def atomo_probabilities(values: np.ndarray, budget: int) -> np.ndarray:
    """Algorithm 1 of Wang et al. (2018), of descending magnitudes."""
    p = np.zeros_like(values)
    for i in range(len(values)):
        rest = values[i:].sum()
        if values[i] * budget <= rest:
            p[i:] = values[i:] * budget / rest if rest else 0
            break
        p[i], budget = 1, budget - 1
    return p


def _first_right(columns: int, rank: int) -> np.ndarray:
    key = jax.random.key(0, impl="threefry2x32")
    return np.asarray(jax.random.normal(key, (columns, rank), jnp.float32), np.float64)


def dion(
    gradients: np.ndarray, rank: int, decay: float = 0.95, feedback: bool = True
) -> np.ndarray:
    """The algorithm of Dion's paper for mean gradients [steps, rows, columns], in float64."""
    rows, columns = gradients.shape[1:]
    momentum, right = np.zeros((rows, columns)), _first_right(columns, rank)
    found = []
    for gradient in gradients:
        whole = momentum + gradient
        left, _ = np.linalg.qr(whole @ right)
        factor = whole.T @ left
        sent = left @ factor.T if feedback else whole
        momentum = whole - (1 - decay) * sent
        right = factor / np.linalg.norm(factor, axis=0)
        found.append((columns / rows) ** 0.5 * left @ right.T)
    return np.stack(found)
