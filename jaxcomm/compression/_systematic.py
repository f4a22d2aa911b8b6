"""Systematic sampling: a fixed number of draws with given inclusion probabilities."""

import jax
import jax.numpy as jnp

from jaxcomm import _noise

SLACK = 2.0**-20  # relative, of the sum of probabilities; more than its rounding error in float32


def digits(count: int) -> int:
    """The binary digits of a probability: the most with `count * 2**digits <= 2**31`.

    The product exceeds 2**30, so each of 2**28 coordinates can have a code of at least 1.
    """
    return (2**31 // max(count, 1)).bit_length() - 1


def round_up(probabilities: jax.Array, x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Probabilities of nonzero `x` in units of `2**-digits`, and the excess of their sum, uint32.

    The sum may exceed `count`, by the rounding of each probability and by that of their float sum.
    """
    one = 2 ** digits(count)
    codes = jnp.ceil(probabilities * float(one))
    codes = jnp.where(x != 0, jnp.maximum(codes, 1), 0).astype(jnp.uint32)
    # The integer sum is exact; a float sum is not.
    total = jnp.sum(codes, dtype=jnp.uint32)
    return codes, jnp.maximum(total, jnp.uint32(count * one)) - jnp.uint32(count * one)


def shrink(codes: jax.Array, count: int) -> jax.Array:
    """The codes, scaled down so that their sum is at most `count`."""
    available = count * 2 ** digits(count) * (1 - SLACK) - codes.size
    total = jnp.sum(codes, dtype=jnp.uint32).astype(jnp.float32)
    scaled = codes.astype(jnp.float32) * (available / jnp.maximum(total, 1))
    return jnp.ceil(scaled).astype(jnp.uint32)


def draw(codes: jax.Array, count: int, private: jax.Array) -> jax.Array:
    """Draws coordinates with these probabilities: ascending uint32[count], padded with `size`.

    The probabilities are intervals laid end to end. The coordinates whose intervals contain
    :math:`u, u + 1, u + 2, ...` are drawn. With :math:`u` uniform in [0, 1), each is drawn with a
    probability equal to its length.
    """
    offset = _noise.bits(private, (1,)) >> (32 - digits(count))
    points = offset + jnp.arange(count, dtype=jnp.uint32) * jnp.uint32(2 ** digits(count))
    ends = jnp.cumsum(codes, dtype=jnp.uint32)
    return jnp.searchsorted(ends, points, side="right").astype(jnp.uint32)


def inverse_of(codes: jax.Array, count: int) -> jax.Array:
    """One over each probability, float32."""
    return 2.0 ** digits(count) / jnp.maximum(codes, 1).astype(jnp.float32)


def excess(size: int, count: int) -> float:
    r"""The bound on :math:`\sum_j x_j^2 / p_j` relative to :math:`\|x\|^2`, about size / count.

    For probabilities of at least :math:`\min(count |x_j| / \|x\|_1, 1)` before they are rounded.
    """
    total = count * 2 ** digits(count)
    # The second factor bounds how much shrinking reduces the probabilities.
    return size / count * (total + size) / (total * (1 - SLACK) - size)
