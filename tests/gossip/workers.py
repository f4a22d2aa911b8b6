"""Runs gossip on n workers, one simulated step after the other, without a loss."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

import jaxcomm
from jaxcomm import _noise, gossip
from tests.mutants import Mutant, given, honest, kept, returned
from tests.workers import mesh_of


def start(workers: int, size: int = 12, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(workers, size)).astype(np.float32)


def steps(count: int, workers: int, size: int = 12, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (0.1 * rng.normal(size=(count, workers, size))).astype(np.float32)


def initial(tx: Any, x: Any, on_mesh: bool = False) -> Any:
    workers = len(x)
    where = mesh_of(workers) if on_mesh else workers
    return jaxcomm.init(tx, jaxcomm.PerWorker({"data": jnp.asarray(x)}), where)


@functools.cache
def initial_of_start(tx: Any, workers: int) -> Any:
    return initial(tx, start(workers))


def _one(tx: Any, x: Any, state: Any, update: Any, extra: Any, mutant: Any = None) -> Any:
    change, state = tx.update(update, state, x, **extra)
    if mutant:
        change = returned(mutant, change)
    return optax.apply_updates(x, change), state


@functools.cache
def _simulated(tx: Any, own: tuple[str, ...]) -> Any:
    def local(state: Any, axes: Any, of: Any) -> Any:
        return jax.tree.map(
            lambda a, x: x if a is None else of(x), axes, state, is_leaf=lambda a: a is None
        )

    def run(x: Any, state: Any, updates: Any, extra: Any, mutant: Mutant) -> Any:
        axes = jax.tree.map(lambda s: 0 if s else None, jaxcomm.state_specs(state))
        extra_axes = {name: 0 if name in own else None for name in extra}
        step = jax.vmap(
            functools.partial(_one, tx, mutant=mutant),
            in_axes=(0, axes, 0, extra_axes),
            out_axes=(0, axes),
            axis_name="data",
        )

        def body(carry: Any, update: Any) -> Any:
            x, state = step(*carry, given(mutant, update), extra)
            return (x, kept(mutant, state, split)), x

        split = local(state, axes, lambda x: x[:, None])
        (_, after), xs = jax.lax.scan(body, (x, split), updates)
        return xs, local(after, axes, lambda x: x[:, 0])

    return jax.jit(run)


def trajectory(
    tx: Any,
    x: np.ndarray,
    updates: np.ndarray,
    mutant: Mutant | None = None,
    first: Any = None,
    **extra: Any,
) -> tuple[np.ndarray, Any]:
    """The parameters of all workers after each step, [steps, n, ...] in float64, and the state."""
    own = tuple(name for name in extra if name == "weight")
    run = _simulated(tx, own)
    mutant = mutant or honest(len(x))
    first = initial(tx, x) if first is None else first
    xs, state = run(jnp.asarray(x), first, jnp.asarray(updates), extra, mutant)
    return np.asarray(xs, np.float64), state


def on_mesh(tx: Any, workers: int) -> Any:
    """`(x, state, update) -> (x, state)` on devices, [n, ...] each."""

    def run(x: Any, state: Any, update: Any) -> Any:
        specs = (PartitionSpec("data"), jaxcomm.state_specs(state), PartitionSpec("data"))

        def local(x: Any, state: Any, update: Any) -> Any:
            x, state = _one(tx, x[0], state, update[0], {})
            return x[None], state

        return jax.shard_map(local, mesh=mesh_of(workers), in_specs=specs, out_specs=specs[:2])(
            x, state, update
        )

    return jax.jit(run)


def flags_of(mixing: gossip.Mixing, count: int, seed: int = 0) -> np.ndarray:
    """Which matrices are active in each step, bool[steps, matrices]."""
    if mixing.active is None:
        return np.ones((count, len(mixing.matrices)), bool)
    key = jax.random.key(seed, impl="threefry2x32")

    def draw(step: jax.Array) -> jax.Array:
        # As with one unit of parameters.
        keys, _ = _noise.keys_per_unit(key, step, 2, jnp.int32(0))
        return mixing.active(keys.shared, step)

    return np.asarray(jax.jit(jax.vmap(draw))(jnp.arange(count, dtype=jnp.uint32)))


def matrices_of(mixing: gossip.Mixing, count: int, seed: int = 0) -> np.ndarray:
    """W of each step, float64[steps, n, n]."""
    changes = np.stack([m - np.eye(mixing.workers) for m in mixing.matrices])
    return np.eye(mixing.workers) + np.einsum("tk,kij->tij", flags_of(mixing, count, seed), changes)
