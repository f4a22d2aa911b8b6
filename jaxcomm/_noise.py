"""Counter-based random bits: equal on CPU, GPU and TPU, under `jax.shard_map` and `jax.vmap`.

Threefry gives two seeds per unit and step; a hash of (seeds, position) gives workers seeds of their
own, and from those the bits, at about a tenth of threefry's cost. The state holds one replicated
key and a step count, so any number of workers can restore it.
"""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32

from jaxcomm import _axis
from jaxcomm._base import AxisName, Coins, PyTree
from pallas_kernels import _hash

_IMPLEMENTATION = "threefry2x32"


def make_key(seed: int | jax.Array, key: jax.Array | None) -> jax.Array:
    """The key of an aggregator, from `seed` or from the user's typed `key`, which wins."""
    if key is None:
        return jax.random.key(seed, impl=_IMPLEMENTATION)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.shape != ():
        raise ValueError(
            f"`key` must be one typed key, as `jax.random.key(0)` makes, got {key.dtype} of shape "
            f"{key.shape}."
        )
    if str(jax.random.key_impl(key)) != _IMPLEMENTATION:
        raise ValueError(
            f"`key` must be a {_IMPLEMENTATION} key, got {jax.random.key_impl(key)}, whose draws "
            f"differ under `jax.vmap`. Use `jax.random.key(seed, impl={_IMPLEMENTATION!r})`."
        )
    return key


def placed_key(key: jax.Array, axis_name: AxisName, tree: PyTree) -> jax.Array:
    r"""The key with which an aggregator draws: another wherever its axes or its leaves are others.

    .. math:: (k_0, k_1) \oplus h(\text{axes}, \text{paths of the leaves})

    with a hash of 64 bits, known while tracing. Stages over unlike axes and branches over unlike
    leaves draw apart from one seed, while an optimizer that is built anew, on any machine, draws
    as before: nothing is counted, and nothing depends on the process.
    """
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]
    place = "\n".join([_axis.label(axis_name), *paths])
    words = np.frombuffer(hashlib.blake2b(place.encode(), digest_size=8).digest(), ">u4")
    return key_of(seeds(key) ^ words.astype(np.uint32))


def make_coins(key: jax.Array, step: jax.Array, units: int, worker: jax.Array) -> list[Coins]:
    """The coins of every unit in one step on one worker, those of :func:`coins_of_units`."""
    every = coins_of_units(key, step, units, worker)
    return [Coins(*(keys[unit] for keys in every)) for unit in range(units)]


def coins_of_units(key: jax.Array, step: jax.Array, units: int, worker: jax.Array) -> Coins:
    r"""The coins of every unit in one step on one worker, key[units] each.

    Threefry under `key` takes the counters (step, number), of two numbers a unit; the first gives
    its public key. The second gives the seeds of a stream of words, of which worker :math:`w` takes
    words :math:`2w` and :math:`2w + 1` as its private key. One call of threefry, since each takes
    longer to compile than all the rest of an aggregator.
    """
    number = jnp.arange(2 * units, dtype=jnp.uint32)
    counters = jnp.concatenate([jnp.full_like(number, step.astype(jnp.uint32)), number])
    words = threefry_2x32(seeds(key), counters).reshape(2, 2 * units).T
    streams = words[units:]
    position = (2 * worker).astype(jnp.uint32) + jnp.arange(2, dtype=jnp.uint32)
    own = _hash.bits(position[None], streams[:, :1], streams[:, 1:])
    return Coins(key_of(words[:units]), key_of(own))


def beyond(coins: Coins, start: int) -> Coins:
    r"""The coins of a part that begins at coordinate `start`: its `bits` are the whole's there.

    .. math:: (2 k_0 + 1) (j + s) + k_1 = (2 k_0 + 1) j + k_1', \qquad k_1' = k_1 + (2 k_0 + 1) s
    """

    def moved(key: jax.Array) -> jax.Array:
        first, second = seeds(key)
        return key_of(jnp.stack([first, second + (2 * first + 1) * jnp.uint32(start % 2**32)]))

    return Coins(*map(moved, coins)) if start else coins


def seeds(key: jax.Array) -> jax.Array:
    """The two words of a threefry key, uint32[2]: what the ops of `pallas_kernels` draw from."""
    return jax.random.key_data(key)


def key_of(words: jax.Array) -> jax.Array:
    """The key of two words, key[], as `seeds` gives them."""
    return jax.random.wrap_key_data(words, impl=_IMPLEMENTATION)


def bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    r"""uint32 random bits: :math:`b_j = m((2 k_0 + 1) j + k_1)`, `m` a mixing bijection.

    Args:
      key: key[], a threefry key; its two words are :math:`k_0, k_1`.
      shape: Static, of fewer than 2**32 elements.

    Raises:
      ValueError: If `shape` has 2**32 elements or more, where the counter would wrap.
    """
    first, second = seeds(key)
    return _hash.bits(_hash.positions(shape), first, second)
