"""Quadratics that differ by worker and by batch, in JAX and in NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.synchronization.events import Subproblem, Task

WORKERS, SIZE, BATCHES = 4, 6, 5
_DRAW = np.random.default_rng(0)
CURVATURE = _DRAW.uniform(0.5, 1.5, (WORKERS, SIZE))
MINIMUM = _DRAW.normal(size=(WORKERS, SIZE))
NOISE = _DRAW.normal(size=(BATCHES, SIZE))
START = _DRAW.normal(size=SIZE)


def vector(tree: Any) -> np.ndarray:
    """The parameters as the oracles keep them; rows for leaves with a leading axis of workers."""
    a, b = np.asarray(tree["a"], np.float64), np.asarray(tree["b"], np.float64)
    return np.concatenate([a, b.reshape(*a.shape[:-1], -1)], axis=-1)


def tree(x: np.ndarray) -> dict[str, jax.Array]:
    """The parameters as policies see them, in two leaves."""
    return {
        "a": jnp.asarray(x[:4], jnp.float32),
        "b": jnp.asarray(x[4:], jnp.float32).reshape(1, 2),
    }


def gradient(x: np.ndarray, worker: int, number: int) -> np.ndarray:
    """The gradient of a worker for one of its batches."""
    return CURVATURE[worker] * (x - MINIMUM[worker]) + NOISE[number % BATCHES]


def work(point: Any, task: Task) -> tuple[jax.Array, Any]:
    """The same as a `Work`; the loss is the noiseless one."""
    curvature, minimum, noise = (jnp.asarray(x, jnp.float32) for x in (CURVATURE, MINIMUM, NOISE))
    x = jnp.concatenate([point["a"], point["b"].ravel()])
    away = x - minimum[task.worker]
    g = curvature[task.worker] * away + noise[task.number % BATCHES]
    return jnp.vdot(curvature[task.worker], away * away) / 2, {
        "a": g[:4],
        "b": g[4:].reshape(1, 2),
    }


def halved(point: Any, task: Task) -> tuple[jax.Array, Any]:
    """The squared norm and its half's gradient, for parameters of any shape."""
    losses = [jnp.vdot(x, x).astype(jnp.float32) for x in jax.tree.leaves(point)]
    return sum(losses, start=jnp.float32(0)), point


def whole(point: Any, task: Task) -> tuple[jax.Array, Any]:
    """The gradient of all batches of a worker, as a `Work`."""
    curvature, minimum = (jnp.asarray(x, jnp.float32) for x in (CURVATURE, MINIMUM))
    x = jnp.concatenate([point["a"], point["b"].ravel()])
    g = curvature[task.worker] * (x - minimum[task.worker])
    return jnp.float32(0), {"a": g[:4], "b": g[4:].reshape(1, 2)}


def shrunk(x: Any, rate: float) -> Any:
    """The proximal operator of a tenth of the absolute values."""
    return jax.tree.map(lambda x: jnp.sign(x) * jnp.maximum(jnp.abs(x) - 0.1 * rate, 0), x)


def solve(point: Subproblem, task: Task) -> tuple[jax.Array, Any]:
    """The minimum of a subproblem of ADMM, whose function is the noiseless quadratic."""
    dtype = point.curvature.dtype
    curvature, minimum = jnp.asarray(CURVATURE, dtype), jnp.asarray(MINIMUM, dtype)
    v = jnp.concatenate([point.linear["a"], point.linear["b"].ravel()])
    c, m = curvature[task.worker], minimum[task.worker]
    x = (c * m - v) / (c + point.curvature)
    return jnp.sum(x), {"a": x[:4], "b": x[4:].reshape(1, 2)}


def at_zero(point: Subproblem, task: Task) -> tuple[jax.Array, Any]:
    """The minimum of a subproblem whose function is 0, for parameters of any shape."""
    return jnp.float32(0), jax.tree.map(lambda v: -v / point.curvature, point.linear)
