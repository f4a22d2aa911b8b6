"""An order of messages that compilers keep."""

import jax
import jax.numpy as jnp

from jaxcomm import _axis
from jaxcomm._base import PyTree


def after(updates: PyTree, earlier: PyTree) -> PyTree:
    """`updates`, whose messages start when those that lead to `earlier` have arrived.

    XLA drops barriers before it combines collectives of several groups in one. So one coordinate
    of each leaf depends on all of `earlier`: it adds `0 x`, which XLA does not know to be 0, since
    `x` might be NaN. Here it is not, so that other groups stay finite if one is not. Leaves that
    Explicit axes shard are omitted, since one coordinate of them would have to be sent.
    """
    is_sharded = lambda x: any(jax.typeof(x).sharding.spec)  # noqa: E731
    previous = [x for x in jax.tree.leaves(earlier) if x.size and not is_sharded(x)]
    if not previous:
        return updates
    firsts = jnp.stack([x[(0,) * x.ndim].astype(jnp.float32) for x in previous])
    zero = jnp.sum(jnp.where(jnp.isfinite(firsts), firsts, 0) * 0)

    def depending(x: jax.Array) -> jax.Array:
        if not x.size:
            return x
        return x.at[(0,) * x.ndim].add(_axis.varying_like(zero, x).astype(x.dtype))

    return jax.tree.map(depending, updates)
