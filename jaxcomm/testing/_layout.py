"""What a codec says of its parts, `codec.layout`."""

from typing import get_args

import jax
import jax.numpy as jnp

from jaxcomm._base import Codec, Context, Layout, PyTree
from jaxcomm.testing._law import require_equal, require_law

LAYOUT = "layout"

_TOGETHER = {"max": jnp.maximum, "sum": jnp.add}


def require_layout(codec: Codec, *, size: int, workers: int, seed: int) -> None:
    """With `layout="shared_statistics"`, parts may be encoded apart with statistics of the whole.

    Statistics of two parts, combined as `reduce_statistics` says, are those of the whole; and
    given these, no coordinate of what is decoded depends on another coordinate.
    """
    require_law(
        codec.layout in get_args(Layout), LAYOUT, f"it is {codec.layout!r}, no {get_args(Layout)}."
    )
    if codec.layout != "shared_statistics":
        return
    require_law(
        set(jax.tree.leaves(codec.reduce_statistics)) <= _TOGETHER.keys(),
        LAYOUT,
        "a bitmap is of the coordinates of one unit, and cannot be shared.",
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
            lambda kind, *pair: _TOGETHER[kind](*pair), codec.reduce_statistics, *parts
        )
        return whole, joined, decoded(x, whole), decoded(other, whole)

    whole, joined, first, second = law(x, other)
    what = "statistics of two parts, combined as `reduce_statistics` says"
    require_equal(LAYOUT, joined, whole, what, tolerance=1e-5)
    what = "the first half, where the other is halved,"
    require_equal(LAYOUT, second[: size // 2], first[: size // 2], what)
