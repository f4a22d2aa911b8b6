"""Workers that are drawn to targets of their own, one step after the other."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm


def distance(params: Any, targets: Any) -> jax.Array:
    """Half of the squared distance to the one target of a worker."""
    squares = jax.tree.map(lambda x, y: 0.5 * jnp.sum((x - y[0]) ** 2), params, targets)
    return sum(jax.tree.leaves(squares))


def half_square(x: jax.Array, target: jax.Array) -> jax.Array:
    """Half of the squared distance to one example."""
    return 0.5 * jnp.sum((x - target) ** 2)


def half_mean_square(x: jax.Array, batch: jax.Array) -> jax.Array:
    """Its mean over the examples [rows, size] of a mini-batch."""
    return jnp.mean(jax.vmap(half_square, (None, 0))(x, batch))


def prepared(tx: Any, targets: Any, workers: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    """`(step, params, state)` of workers at zero, simulated or on a mesh."""
    where = len(jax.tree.leaves(targets)[0]) if workers is None else workers
    make: Any = jaxcomm.simulate if isinstance(where, int) else jaxcomm.make_step
    params = jaxcomm.replicate(jax.tree.map(lambda x: jnp.zeros(x.shape[1:]), targets), where)
    step = make(distance, tx, where, donate=False, **options)
    return step, params, jaxcomm.init(tx, params, where)


def run(tx: Any, targets: Any, count: int, workers: Any = None, **extra: Any) -> tuple[Any, Any]:
    """The parameters of all workers after each step, [steps, n, ...], and the last state."""
    step, params, state = prepared(tx, targets, workers)
    found = []
    for _ in range(count):
        params, state, _ = step(params, state, targets, **extra)
        found.append(params.per_worker["data"])
    return jax.tree.map(lambda *rows: np.stack(rows), *found), state


def account(tx: Any, targets: Any) -> Any:
    """What a simulated step sends, without the mean of losses."""
    step, *args = prepared(tx, targets, metrics="own")
    return jaxcomm.wire.account(step, *args, targets)
