"""Counter-based random bits: equal on CPU, GPU and TPU, under `jax.shard_map` and `jax.vmap`.

Threefry returns two seeds per unit and step. A hash of (seeds, position) returns the private seeds
of each worker, and from those the bits, at about a tenth of the cost of threefry. The state holds
one replicated key and a step count, so any number of workers can restore it.
"""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32

from jaxcomm import _axis
from jaxcomm._contract import AxisName, Keys, PyTree
from pallas_kernels import _hash

_IMPLEMENTATION = "threefry2x32"


def make_key(seed: int | jax.Array) -> jax.Array:
    """The key of an aggregator."""
    return jax.random.key(seed, impl=_IMPLEMENTATION)


def require_key(key: jax.Array) -> jax.Array:
    """The user's typed `key`, of the implementation that draws the same under `jax.vmap`."""
    if (
        key.shape
        or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        or str(jax.random.key_impl(key)) != _IMPLEMENTATION
    ):
        raise ValueError(
            f"`key` must be one typed {_IMPLEMENTATION} key, whose draws are equal under "
            f"`jax.vmap`, such as `jax.random.key(0, impl={_IMPLEMENTATION!r})`, got {key}."
        )
    return key


def placed_key(key: jax.Array, axis_name: AxisName, tree: PyTree) -> jax.Array:
    r"""The key from which an aggregator draws; it depends on its axes and its leaves.

    .. math:: (k_0, k_1) \oplus h(\text{axes}, \text{paths of the leaves})

    where :math:`h` is a static 64-bit hash. Stages over different axes and branches over different
    leaves draw independently from one seed. An optimizer that is built again, on any machine, has
    the same draws: the hash uses no counter, and does not depend on the process.
    """
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]
    place = "\n".join([_axis.label(axis_name), *paths])
    words = np.frombuffer(hashlib.blake2b(place.encode(), digest_size=8).digest(), ">u4")
    return key_of(seeds(key) ^ words.astype(np.uint32))


def keys_per_unit(key: jax.Array, step: jax.Array, units: int, worker: jax.Array) -> list[Keys]:
    """The keys of :func:`keys_of_units` as a list with one entry per unit."""
    keys = keys_of_units(key, step, units, worker)
    return [Keys(*(key[unit] for key in keys)) for unit in range(units)]


def keys_of_units(key: jax.Array, step: jax.Array, units: int, worker: jax.Array) -> Keys:
    r"""The PRNG keys of every unit in one step on one worker, key[units] each.

    Threefry under `key` encrypts the counters (step, number), with two numbers per unit. The first
    yields the shared key of the unit. The second yields the seeds of a stream of words; worker
    :math:`w` uses words :math:`2w` and :math:`2w + 1` as its private key. Threefry is called only
    once, because each call takes longer to compile than the rest of an aggregator.
    """
    number = jnp.arange(2 * units, dtype=jnp.uint32)
    counters = jnp.concatenate([jnp.full_like(number, step.astype(jnp.uint32)), number])
    words = threefry_2x32(seeds(key), counters).reshape(2, 2 * units).T
    streams = words[units:]
    position = (2 * worker).astype(jnp.uint32) + jnp.arange(2, dtype=jnp.uint32)
    private = _hash.bits(position[None], streams[:, :1], streams[:, 1:])
    return Keys(key_of(words[:units]), key_of(private))


def beyond(keys: Keys, start: int) -> Keys:
    r"""The keys of a slice that begins at coordinate `start`: its `bits` are a slice of the whole.

    .. math:: (2 k_0 + 1) (j + s) + k_1 = (2 k_0 + 1) j + k_1', \qquad k_1' = k_1 + (2 k_0 + 1) s
    """

    def moved(key: jax.Array) -> jax.Array:
        first, second = seeds(key)
        return key_of(jnp.stack([first, second + (2 * first + 1) * jnp.uint32(start % 2**32)]))

    return Keys(*map(moved, keys)) if start else keys


def seeds(key: jax.Array) -> jax.Array:
    """The two words of a threefry key, uint32[2]; the ops of `pallas_kernels` draw from them."""
    return jax.random.key_data(key)


def key_of(words: jax.Array) -> jax.Array:
    """The threefry key with these two words, key[]; the inverse of `seeds`."""
    return jax.random.wrap_key_data(words, impl=_IMPLEMENTATION)


def bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    r"""uint32 random bits: :math:`b_j = m((2 k_0 + 1) j + k_1)`, `m` a mixing bijection.

    Args:
      key: key[], a threefry key; its two words are :math:`k_0, k_1`.
      shape: Static, with fewer than 2**32 elements.

    Raises:
      ValueError: If `shape` has 2**32 elements or more, so that the counter would wrap.
    """
    first, second = seeds(key)
    return _hash.bits(_hash.positions(shape), first, second)


def turn(dtype: np.dtype, period: int) -> int:
    """By how much a counter that is full goes back: whole periods, half its range if they fit."""
    half = (int(jnp.iinfo(dtype).max) + 1) // 2
    return max(half // period, 1) * period


def following(step: jax.Array, period: int = 1) -> jax.Array:
    r"""The number of steps after one more; a counter that is full goes back by whole periods.

    .. math:: t \gets t + 1, \qquad t \gets t + 1 - m k \text{ where } t + 1 \text{ does not fit}

    So what depends on :math:`t \bmod k` goes on, numbers differ from step to step, and what ends
    after at most half the range of the counter, such as a warm-up, does not begin again.

    Args:
      step: An integer array.
      period: :math:`k`, at least 1.
    """
    last = np.array(jnp.iinfo(step.dtype).max, step.dtype)
    return jnp.where(step == last, last - (turn(step.dtype, period) - 1), step + 1)
