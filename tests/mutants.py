"""Six mistakes that pass for a working method, made of any method without compiling it again."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

WORKERS = 8


class Mutant(NamedTuple):
    """What is done to a method from outside; arrays, so that one program makes all mistakes.

    Attributes:
      scale: Results are multiplied by it, [].
      shares: Each worker's update is multiplied by its own, [workers].
      remembers: Whether floating-point state outlives a step, bool[].
      shows: Whether a method sees the NaNs that it is given, bool[].
    """

    scale: np.ndarray
    shares: np.ndarray
    remembers: np.ndarray
    shows: np.ndarray


HONEST = Mutant(np.float32(1), np.ones(WORKERS, np.float32), np.bool_(True), np.bool_(True))


def _of_worker(worker: int, share: float) -> np.ndarray:
    shares = np.ones(WORKERS, np.float32)
    shares[worker] = share
    return shares


FORGETFUL = "the residual not kept"
MUTANTS = {
    "the mean over a worker too few": HONEST._replace(scale=np.float32(WORKERS / (WORKERS - 1))),
    "the last worker dropped": HONEST._replace(shares=_of_worker(-1, 0)),
    "a sign flipped": HONEST._replace(shares=_of_worker(3, -1)),
    "the count forgotten": HONEST._replace(scale=np.float32(WORKERS)),
    FORGETFUL: HONEST._replace(remembers=np.bool_(False)),
    "a NaN hidden": HONEST._replace(shows=np.bool_(False)),
}


def given(mutant: Mutant, updates: Any) -> Any:
    """What the mutant makes of every worker's update, [n, ...]."""

    def spoil(x: jax.Array) -> jax.Array:
        shares = mutant.shares.reshape(-1, *[1] * (x.ndim - 1)).astype(x.dtype)
        seen = jnp.where(jnp.isnan(x) & ~mutant.shows, 0, x)
        return jnp.where(shares == 0, 0, seen * shares)

    return jax.tree.map(spoil, updates)


def returned(mutant: Mutant, results: Any) -> Any:
    return jax.tree.map(lambda x: x * mutant.scale.astype(x.dtype), results)


def is_memory(leaf: Any) -> bool:
    """Numbers of a state are memory; counts, keys and flags are not."""
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def kept(mutant: Mutant, state: Any, first: Any) -> Any:
    return jax.tree.map(
        lambda new, old: jnp.where(mutant.remembers, new, old) if is_memory(new) else new,
        state,
        first,
    )
