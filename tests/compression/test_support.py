"""Bitmaps of rows, blocks and coordinates, and the parts whose bits are set."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.compression import _bits, _support
from tests.slow import slow


@pytest.mark.parametrize(
    ("shape", "granularity", "count", "width"),
    [
        ((7, 3, 2), "row", 7, 6),
        ((5, 13), "element", 65, 1),
        ((100,), 8, 13, 8),
        ((), "element", 1, 1),
        ((3,), 10, 1, 10),
    ],
)
def test_bits_mark_nonzero_parts(
    shape: tuple[int, ...], granularity: _support.Granularity, count: int, width: int
) -> None:
    rng = np.random.default_rng(0)
    x = (rng.normal(size=shape) * (rng.random(shape) < 0.1)).astype(np.float32)
    parts = _support.parts_of(shape, granularity)
    assert parts == (count, width, x.size)
    filled = np.zeros(count * width)
    filled[: x.size] = x.ravel()
    words = jax.jit(functools.partial(_support.bitmap, parts=parts))(x)
    assert words.dtype == jnp.uint32 and words.size == -(-count // 32)
    expected = (filled.reshape(count, width) != 0).any(axis=1)
    np.testing.assert_array_equal(_bits.unpack_bits(words, count), expected)
    assert int(_support.count(words)) == np.sum(expected)


@pytest.mark.parametrize("capacity", [64, slow(1), slow(7), slow(1000)])
def test_windows_cover_all_members_once(capacity: int) -> None:
    parts = _support.Parts(777, 1, 777)
    members = jax.jit(functools.partial(_support.members, capacity=capacity, parts=parts))
    for density in (0.0, 0.03, 0.5, 1.0):
        mask = np.random.default_rng(1).random(777) < density
        words, starts = _bits.pack_bits(jnp.asarray(mask)), range(0, max(mask.sum(), 1), capacity)
        found = np.concatenate([members(words, jnp.int32(first)) for first in starts])
        there = np.flatnonzero(mask)
        assert sorted(found[: there.size]) == list(there)
        assert (found[there.size :] == 777).all()  # What is missing comes last.


def test_rows_need_two_axes() -> None:
    with pytest.raises(ValueError, match="two axes or more"):
        _support.parts_of((5,), "row")
