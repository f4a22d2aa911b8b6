"""The same coins give the same payload, and receivers decode it with what they know."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm._base import Codec, Coins, Context, Memory, PyTree
from jaxcomm._entries import entries_of
from jaxcomm.testing._form import RECEIVERS
from jaxcomm.testing._inputs import inputs
from jaxcomm.testing._law import require_equal
from jaxcomm.testing._single_worker import context_of, keys

COINS, JIT, VMAP, ENTRIES = "same coins", "jit", "vmap", "entries"
NEAR = 1e-5  # Of floats that compilers round in another order.


def require_repeats(codec: Codec, *, size: int, seed: int) -> None:
    """One worker's payload depends on its coins alone, and what is decoded on no private one."""
    x = jnp.asarray(inputs(size)["normal"][0], jnp.float32)
    public, private, other = keys(3, seed)
    memory = codec.init(x)

    def encode(x: jax.Array, memory: Memory, coins: Coins) -> tuple[Context, PyTree, Memory]:
        context = context_of(codec, x, coins, memory)
        return context, *codec.encode(context, x)

    jitted = jax.jit(encode)
    coins = Coins(public, private)
    context, payload, after = jitted(x, memory, coins)
    _, again, _ = jitted(x, memory, coins)
    require_equal(COINS, again, payload, "the payload of a second call, at ")
    _, eager, _ = encode(x, memory, coins)
    require_equal(JIT, payload, eager, "the payload under jit, at ", tolerance=NEAR)
    several = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), (x, memory, coins))
    _, mapped, _ = jax.jit(jax.vmap(encode))(*several)
    second = jax.tree.map(lambda leaf: leaf[1], mapped)
    require_equal(VMAP, second, payload, "the payload under vmap, at ", tolerance=NEAR)
    _require_of_receivers(codec, context, payload, after, other)
    if (entries := entries_of(codec)) is not None:
        received = context.received()
        indices, values = entries(received, payload)
        # Feedback replaces at the entries, and a mean adds there.
        told = jnp.zeros(x.size).at[indices].set(values, mode="drop").reshape(x.shape)
        decoded = codec.decode(received, payload)
        require_equal(ENTRIES, told, decoded, "entries that are set and not added, at ")


def _require_of_receivers(
    codec: Codec, context: Context, payload: PyTree, after: Memory, other: jax.Array
) -> None:
    """Neither the private coin nor any memory changes what is decoded."""
    decode: Any = jax.jit(codec.decode)
    own = decode(context, payload)
    changed = context.replace(coins=Coins(context.coins.public, other), memory=after)
    what = "what is decoded with another private coin and a later memory, at "
    require_equal(RECEIVERS, decode(changed, payload), own, what)
    what = "what is decoded with neither private coin nor memory, at "
    require_equal(RECEIVERS, decode(context.received(), payload), own, what, tolerance=NEAR)
