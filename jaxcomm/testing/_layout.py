"""Checks `codec.layout`, which states whether parts can be encoded separately."""

from typing import get_args

import jax
import jax.numpy as jnp

from jaxcomm._contract import Codec, Context, Layout, PyTree
from jaxcomm.testing._law import require_equal, require_law

LAYOUT = "layout"

_REDUCTIONS = {"max": jnp.maximum, "sum": jnp.add}


def require_layout(codec: Codec, *, size: int, workers: int, seed: int) -> None:
    """Checks that parts can be encoded separately with `layout="shared_statistics"`.

    Statistics of two parts, combined as `reduce_statistics` specifies, must equal those of the
    whole. With these statistics, no decoded coordinate may depend on another coordinate.
    """
    require_law(
        codec.layout in get_args(Layout),
        LAYOUT,
        f"it must be one of {get_args(Layout)}, got {codec.layout!r}.",
    )
    if codec.layout != "shared_statistics":
        return
    require_law(
        set(jax.tree.leaves(codec.reduce_statistics)) <= _REDUCTIONS.keys(),
        LAYOUT,
        "a bitmap has one bit per coordinate of a unit, so units cannot share it.",
    )
    together = workers if codec.combine is not None else 1
    x = jax.random.normal(jax.random.key(seed), (size,), jnp.float32)
    other = jnp.concatenate([x[: size // 2], x[size // 2 :] / 2])

    def measured(x: jax.Array) -> PyTree:
        return codec.measure(Context.of(x, seed, codec.init(x)), x)

    def decoded(x: jax.Array, statistics: PyTree) -> jax.Array:
        context = Context.of(x, seed, codec.init(x)).replace(
            statistics=statistics, workers=together
        )
        payload, _ = codec.encode(context, x)
        return codec.decode(context.received(), payload)

    @jax.jit
    def law(x: jax.Array, other: jax.Array) -> tuple[PyTree, ...]:
        whole = measured(x)
        parts = [measured(x[: size // 3]), measured(x[size // 3 :])]
        joined = jax.tree.map(
            lambda kind, *pair: _REDUCTIONS[kind](*pair), codec.reduce_statistics, *parts
        )
        return whole, joined, decoded(x, whole), decoded(other, whole)

    whole, joined, first, second = law(x, other)
    what = "the combined statistics of two parts, against those of the whole, "
    require_equal(LAYOUT, joined, whole, what, tolerance=1e-5)
    what = "the decoded first half, after the second half was scaled, "
    require_equal(LAYOUT, second[: size // 2], first[: size // 2], what)
