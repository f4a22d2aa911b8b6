"""Makes six plausible mistakes in any method, without compiling it again."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

WORKERS = 8


class Mutant(NamedTuple):
    """Changes applied around a method; arrays, so that one program makes all mistakes.

    Attributes:
      scale: Results are multiplied by it, [].
      shares: Each worker's update is multiplied by its own, [workers].
      remembers: Whether floating-point state is kept after a step, bool[].
      shows: Whether a method sees the NaNs in its input, bool[].
    """

    scale: np.ndarray
    shares: np.ndarray
    remembers: np.ndarray
    shows: np.ndarray


FORGETFUL = "the residual not kept"


@functools.cache
def honest(workers: int = WORKERS) -> Mutant:
    ones = np.ones(workers, np.float32)
    return Mutant(np.float32(1), ones, np.bool_(True), np.bool_(True))


@functools.cache
def mutants(workers: int = WORKERS) -> dict[str, Mutant]:
    right, last, fourth = honest(workers), np.ones(workers), np.ones(workers)
    last[-1], fourth[3] = 0, -1
    return {
        "the mean over a worker too few": right._replace(scale=np.float32(workers / (workers - 1))),
        "the last worker dropped": right._replace(shares=last.astype(np.float32)),
        "a sign flipped": right._replace(shares=fourth.astype(np.float32)),
        "the count forgotten": right._replace(scale=np.float32(workers)),
        FORGETFUL: right._replace(remembers=np.bool_(False)),
        "a NaN hidden": right._replace(shows=np.bool_(False)),
    }


def given(mutant: Mutant, updates: Any) -> Any:
    """The mutant's results for every worker's update, [n, ...]."""

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


def remembers(state: Any) -> bool:
    return any(is_memory(leaf) for leaf in jax.tree.leaves(state))


def uncaught(check: Callable[[Mutant], None], exempt: set[str], workers: int = WORKERS) -> set[str]:
    """Names of the mistakes that the check does not catch."""
    found = set()
    for name, mutant in mutants(workers).items():
        if name in exempt:
            continue
        try:
            check(mutant)
        except AssertionError:
            continue
        found.add(name)
    return found


class MutableState(NamedTuple):
    """The state of a transformation that :func:`mutable` has wrapped."""

    inner: Any
    mutant: Mutant


def mutable(tx: Any, workers: int) -> Any:
    """The transformation, and its mutants: their switches are in its state, for :func:`mutated`."""

    def init(params: Any) -> MutableState:
        return MutableState(tx.init(params), jax.tree.map(jnp.asarray, honest(workers)))

    def update(updates: Any, state: MutableState, params: Any = None, **extra: Any) -> Any:
        mutant, own = state.mutant, jax.lax.axis_index("data")
        one = mutant._replace(shares=mutant.shares[own][None])
        spoilt = jax.tree.map(lambda x: x[0], given(one, jax.tree.map(lambda x: x[None], updates)))
        results, after = tx.update(spoilt, state.inner, params, **extra)
        after = kept(mutant, after, state.inner)
        return returned(mutant, results), MutableState(after, mutant)

    return optax.GradientTransformationExtraArgs(init, update)


def mutated(state: Any, mutant: Mutant) -> Any:
    """The state, with other switches."""
    is_mutable = lambda node: isinstance(node, MutableState)  # noqa: E731
    return jax.tree.map(
        lambda node: node._replace(mutant=mutant) if is_mutable(node) else node,
        state,
        is_leaf=is_mutable,
    )
