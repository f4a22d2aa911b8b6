"""Random directions that all workers draw from public seeds, and never store."""

import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry_2x32

from jaxcomm import _axis, _noise
from jaxcomm._contract import PyTree
from jaxcomm._units import explicit_spec, resharded
from pallas_kernels import _hash

Distribution: TypeAlias = Literal["gaussian", "rademacher"]

TOGETHER = 2**16  # Coordinates that are drawn at once: loops over small arrays are slow.


def _gaussian(words: jax.Array) -> jax.Array:
    # The middles of 2^23 intervals of (-1, 1), exactly: symmetric, and never 1, which is infinite.
    uniform = ((words >> 9).astype(jnp.float32) + 0.5) * 2.0**-22 - 1
    return 2.0**0.5 * lax.erf_inv(uniform)


def _rademacher(words: jax.Array) -> jax.Array:
    return 1 - 2 * (words >> 31).astype(jnp.float32)


_SAMPLES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gaussian": _gaussian,
    "rademacher": _rademacher,
}


def require_distribution(distribution: str) -> None:
    """Raises unless `distribution` is a `Distribution`."""
    if distribution not in _SAMPLES:
        raise ValueError(
            f"`distribution` must be one of {get_args(Distribution)}, got {distribution!r}."
        )


class Directions:
    """The directions of a step, each a tree of float32 arrays; they are drawn where they are used.

    The seeds of leaf j in direction k are the words of threefry at the counters (step, k L + j),
    for L leaves. A coordinate is a sample from the hash of these seeds and its position.
    """

    def __init__(
        self, like: PyTree, key: jax.Array, step: jax.Array, count: int, distribution: Distribution
    ):
        leaves, self.treedef = jax.tree.flatten(like)
        self.shapes = [x.shape for x in leaves]
        self.specs = [*map(explicit_spec, leaves)]
        self.sample = _SAMPLES[distribution]
        number = jnp.arange(count * len(leaves), dtype=jnp.uint32)
        counters = jnp.concatenate([jnp.full_like(number, step.astype(jnp.uint32)), number])
        words = threefry_2x32(_noise.seeds(key), counters).reshape(2, -1)
        self.seeds = words.T.reshape(count, len(leaves), 2)
        size = max(sum(map(math.prod, self.shapes)), 1)
        fits = [n for n in range(1, count + 1) if count % n == 0 and n * size <= TOGETHER]
        self.together = max(fits, default=1)

    def drawn(self, seeds: jax.Array) -> PyTree:
        """The direction of these seeds, uint32[leaves, 2]."""
        return jax.tree.unflatten(
            self.treedef,
            [
                resharded(self.sample(_hash.bits(_hash.positions(shape), *own)), spec)
                for own, shape, spec in zip(seeds, self.shapes, self.specs, strict=True)
            ],
        )

    def each(self, fn: Callable[[PyTree], PyTree], together: int | None = None) -> Any:
        """The results of `fn` for all directions, stacked; one by one, or vectorized."""
        return lax.map(lambda seeds: fn(self.drawn(seeds)), self.seeds, batch_size=together)

    def projections(self, tree: PyTree) -> jax.Array:
        r""":math:`\langle u_k, x \rangle` of a tree, float32[count]."""
        leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(tree)]

        def projection(direction: PyTree) -> jax.Array:
            products = zip(leaves, jax.tree.leaves(direction), strict=True)
            return jnp.sum(jnp.stack([jnp.sum(x * u) for x, u in products]))

        found: jax.Array = self.each(projection, self.together)
        return found

    def combined(self, coefficients: jax.Array) -> PyTree:
        r""":math:`\sum_k c_k u_k`, a tree of float32 arrays."""
        blocks = coefficients.size // self.together
        seeds = self.seeds.reshape(blocks, self.together, *self.seeds.shape[1:])

        def add(total: PyTree, block: tuple[jax.Array, jax.Array]) -> tuple[PyTree, None]:
            def weighted(c: jax.Array, seeds: jax.Array) -> PyTree:
                return jax.tree.map(lambda u: c * u, self.drawn(seeds))

            terms = jax.vmap(weighted)(block[0], block[1])
            return jax.tree.map(lambda x, y: x + jnp.sum(y, axis=0), total, terms), None

        zeros = [
            _axis.varying_like(resharded(jnp.zeros(shape, jnp.float32), spec), coefficients)
            for shape, spec in zip(self.shapes, self.specs, strict=True)
        ]
        first = jax.tree.unflatten(self.treedef, zeros)
        return lax.scan(add, first, (coefficients.reshape(blocks, self.together), seeds))[0]
