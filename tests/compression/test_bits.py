"""Bits and narrow numbers come back, in as few words as hold them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.compression import _bits
from jaxcomm.compression.sparsifiers._largest import mark, marked
from tests.slow import slow


@pytest.mark.parametrize(
    ("width", "count"),
    [(10, 45), (4, 45), *map(slow, (0, 1, 10, 32, 10, 5), (45, 45, 0, 45, 32, 7))],
)
def test_numbers_round_trip(width: int, count: int) -> None:
    rng = np.random.default_rng(width + count)
    numbers = rng.integers(0, 2**width, count, dtype=np.uint32 if width < 32 else np.uint64)
    numbers = numbers.astype(np.uint32)
    numbers[:1] = 2**width - 1
    packed = jax.jit(lambda numbers: _bits.pack_numbers(numbers, width))(jnp.asarray(numbers))
    assert packed.dtype == jnp.uint32 and packed.shape == (-(-count * width // 32),)
    unpacked = jax.jit(lambda packed: _bits.unpack_numbers(packed, width, count))(packed)
    assert unpacked.dtype == jnp.uint32
    np.testing.assert_array_equal(unpacked, numbers)


@pytest.mark.parametrize("count", [1, 32, 70])
def test_the_places_of_marks_in_order_then_the_number_of_bits(count: int) -> None:
    marks = np.random.default_rng(count).random(count) < 0.5
    marks[-1] = True
    words = mark(jnp.asarray(marks))
    (expected,) = np.nonzero(marks)
    missing = np.full(3, 32 * words.size)
    np.testing.assert_array_equal(
        marked(words, len(expected) + 3), np.concatenate([expected, missing])
    )
