"""Narrow fields in words of 32 bits."""

import math

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch
from pallas_kernels._dispatch import Implementation
from pallas_kernels.pack.reference import words

# Wider fields take a whole word each.
WIDTHS = (*range(1, 17), 32)

DTYPES = (jnp.bool, jnp.uint8, jnp.uint32)


def _require_width(bits: int) -> None:
    if bits not in WIDTHS:
        raise ValueError(f"`bits` must be in [1, 16], or 32, got {bits}.")


def bits_for_sum(largest: int, workers: int) -> int:
    r"""The smallest field width that holds the sum over workers.

    .. math:: n m < 2^b

    Args:
      largest: :math:`m`, the largest number that a worker packs.
      workers: :math:`n`.

    Returns:
      :math:`b`, 1 to 16 or 32, for :func:`pack` and :func:`unpack`.

    Raises:
      ValueError: If an argument is not positive, or the sum does not fit in 32 bits.

    Example:
      >>> from pallas_kernels.pack import bits_for_sum
      >>> bits_for_sum(1, workers=8), bits_for_sum(254, workers=2)
      (4, 9)
    """
    for name, value in (("largest", largest), ("workers", workers)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")
    sum_bits = (largest * workers).bit_length()
    if sum_bits > WIDTHS[-1]:
        raise ValueError(
            f"`largest`={largest} over `workers`={workers} sums to {largest * workers}, which does "
            "not fit in 32 bits."
        )
    return min(width for width in WIDTHS if width >= sum_bits)


def pack(
    numbers: jax.Array, *, bits: int, implementation: Implementation | None = None
) -> jax.Array:
    r"""Packs as many fields of `bits` bits as fit into each word of 32 bits.

    .. math:: w_i = \sum_{f < l} 2^{b f} x_{f w + i}, \qquad l = \lfloor 32 / b \rfloor

    for :math:`w` words of :math:`l` fields; fields after the last number are 0. Words of several
    workers can be added. No field carries into the next one as long as the sums are below
    :math:`2^b`; :func:`bits_for_sum` returns a sufficient width.

    Memory traffic: the op reads the numbers once and writes the words once. A kernel reads and
    writes the numbers once more to fill blocks if the number of words is not a multiple of 128
    (TPU) or 512 (GPU), and copies bool to uint8. On a GPU, XLA fuses the reference into one pass.

    Args:
      numbers: bool, uint8 or uint32 of any shape, of fewer than 2**32 elements, each below
        `2**bits`, which is not checked.
      bits: :math:`b`, 1 to 16 or 32. Widths that do not divide 32 leave bits of each word unused.
      implementation: `"reference"`, `"mosaic_gpu"`, `"mosaic_tpu"`, or None for the fastest one, as
        measured or assumed.

    Returns:
      uint32[ceil(size / l)].

    Raises:
      ValueError: If an argument is out of range or of a wrong dtype.
      NotImplementedError: If the device cannot run the named implementation.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.pack import pack, unpack
      >>> words = pack(jnp.array([1, 2, 3], jnp.uint32), bits=4)
      >>> hex(words[0])
      '0x321'
      >>> unpack(words + words, bits=4, shape=(3,)).tolist()
      [2, 4, 6]
    """
    _require_width(bits)
    if numbers.dtype not in DTYPES:
        raise ValueError(f"`numbers` must be bool, uint8 or uint32, got {numbers.dtype}.")
    return _dispatch.run("pack", "pack", implementation, numbers.size, numbers, bits=bits)


def unpack(
    packed: jax.Array,
    *,
    bits: int,
    shape: tuple[int, ...],
    implementation: Implementation | None = None,
) -> jax.Array:
    r"""Unpacks the numbers of :func:`pack`, or their sums over workers.

    .. math:: x_{f w + i} = \lfloor w_i / 2^{b f} \rfloor \bmod 2^b

    Memory traffic: the op reads the words once and writes the numbers once. The exceptions of
    :func:`pack` for other sizes apply.

    Args:
      packed: The words from :func:`pack` for `shape`, or their sum over workers.
      bits: :math:`b`, the same as for :func:`pack`.
      shape: Shape of the result, of fewer than 2**32 elements.
      implementation: As for :func:`pack`.

    Returns:
      uint32 of `shape`.

    Raises:
      ValueError: If an argument is out of range or of a wrong shape or dtype.
      NotImplementedError: If the device cannot run the named implementation.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.pack import unpack
      >>> unpack(jnp.array([0x321], jnp.uint32), bits=4, shape=(3,)).tolist()
      [1, 2, 3]
    """
    _require_width(bits)
    size = math.prod(shape)
    expected = (words(size, bits),)
    if packed.dtype != jnp.uint32 or packed.shape != expected:
        raise ValueError(
            f"`packed` must be uint32{list(expected)} for `bits`={bits} and `shape`={shape}, "
            f"got {packed.dtype}{list(packed.shape)}."
        )
    return _dispatch.run(
        "pack", "unpack", implementation, size, packed, bits=bits, shape=tuple(shape)
    )
