"""Checks that the same coins give the same payload, and that receivers can decode it."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm._contract import Codec, Coins, Context, Memory, PyTree
from jaxcomm.testing._form import RECEIVERS
from jaxcomm.testing._inputs import inputs
from jaxcomm.testing._law import require_equal
from jaxcomm.testing._single_worker import context_of, keys

COINS, JIT, VMAP, ENTRIES = "same coins", "jit", "vmap", "entries"
NEAR = 1e-5  # The tolerance for floats that compilers round in a different order.


def require_repeats(codec: Codec, *, size: int, seed: int) -> None:
    """Checks that a payload depends only on coins, and decoding on no private coin."""
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
    _require_received(codec, context, payload, after, other)
    if (entries := codec.fast.entries) is not None:
        received = context.received()
        indices, values = entries(received, payload)
        # Error feedback sets the entries and a mean adds them; duplicates would differ.
        dense = jnp.zeros(x.size).at[indices].set(values, mode="drop").reshape(x.shape)
        decoded = codec.decode(received, payload)
        require_equal(ENTRIES, dense, decoded, "entries that are set instead of added, at ")


def _require_received(
    codec: Codec, context: Context, payload: PyTree, after: Memory, other: jax.Array
) -> None:
    """Checks that decoding depends neither on the private coin nor on memory."""
    decode: Any = jax.jit(codec.decode)
    expected = decode(context, payload)
    changed = context.replace(coins=Coins(context.coins.public, other), memory=after)
    what = "the array decoded with another private coin and a later memory, at "
    require_equal(RECEIVERS, decode(changed, payload), expected, what)
    what = "the array decoded without private coin and memory, at "
    require_equal(RECEIVERS, decode(context.received(), payload), expected, what, tolerance=NEAR)
