r"""A checksum of an array that does not depend on how the array is sharded.

.. math:: c(x) = \sum_i m(w_i + (2 k + 1)\, i) \bmod 2^{32}

for the words :math:`w_i` of the array, a mixing bijection :math:`m` of 32-bit words and a constant
:math:`k`. A sum has no order, so each device adds its own part. A changed bit is always found; any
other change of the array with probability :math:`1 - 2^{-32}`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import _hash

_STRIDE = 0x9E3779B9


def words(x: jax.Array) -> jax.Array:
    """The bits of an array, as uint32 of its shape; 64-bit values get one more axis."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return words(jnp.stack([x.real, x.imag], axis=-1))
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < 8:
        x = x.astype(jnp.int8)
    bits = (
        jnp.finfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.floating) else 8 * x.dtype.itemsize
    )
    integer = jnp.dtype(f"uint{min(bits, 32)}")
    return lax.bitcast_convert_type(x, integer).astype(jnp.uint32)


def checksum(x: jax.Array) -> jax.Array:
    """uint32[]: the checksum of an array of numbers."""
    w = words(x)
    return jnp.sum(_hash.mix(w + jnp.uint32(_STRIDE) * _hash.positions(w.shape)), dtype=jnp.uint32)


@jax.jit
def _checksums(leaves: list[jax.Array]) -> list[jax.Array]:
    return [checksum(x) for x in leaves]


def _host_words(x: np.ndarray) -> np.ndarray:
    """The bits of a NumPy array, as unsigned integers; JAX would make 32 bits of 64."""
    if jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < 8:
        x = x.astype(np.int8)
    words = np.ascontiguousarray(x)[..., None].view(f"uint{8 * min(x.dtype.itemsize, 4)}")
    return words[..., 0] if x.dtype.itemsize <= 4 else words


def checksums(leaves: Sequence[jax.Array | np.ndarray]) -> list[int]:
    """The checksum of each array; one program for all arrays on the same devices.

    With several processes, all of them call this.
    """
    groups: dict[object, list[int]] = {}
    for number, x in enumerate(leaves):
        devices = frozenset(x.sharding.device_set) if isinstance(x, jax.Array) else None
        groups.setdefault(devices, []).append(number)
    found = [0] * len(leaves)
    for numbers in groups.values():
        values = _checksums(
            [x if isinstance(x := leaves[i], jax.Array) else _host_words(x) for i in numbers]
        )
        for number, value in zip(numbers, values, strict=True):
            found[number] = int(value)
    return found
