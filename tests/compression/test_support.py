"""Bitmaps of rows, blocks and coordinates, and the parts whose bits are set."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.compression import _bits, _support
from tests.slow import slow


def sparse(shape: tuple[int, ...], density: float, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * (rng.random(shape) < density)).astype(np.float32)


@pytest.mark.parametrize(
    ("shape", "granularity", "count", "width"),
    [
        ((7, 3, 2), "row", 7, 6),
        ((70, 1), "row", 70, 1),
        ((5, 13), "element", 65, 1),
        ((100,), 8, 13, 8),
        ((), "element", 1, 1),
        ((3,), 10, 1, 10),
    ],
)
def test_a_bit_is_set_where_a_part_is_not_zero(
    shape: tuple[int, ...], granularity: _support.Granularity, count: int, width: int
) -> None:
    x = sparse(shape, 0.1)
    parts = _support.parts_of(shape, granularity)
    assert parts == (count, width, x.size)
    filled = np.zeros(count * width)
    filled[: x.size] = x.ravel()

    @jax.jit
    def packed(x: jax.Array) -> tuple[jax.Array, ...]:
        words = _support.bitmap(x, parts)
        return words, _bits.unpack_bits(words, count), _support.count(words)

    words, bits, counted = packed(x)
    assert words.dtype == jnp.uint32 and words.size == -(-count // 32)
    np.testing.assert_array_equal(bits, (filled.reshape(count, width) != 0).any(axis=1))
    assert int(counted) == np.sum(bits)


@functools.partial(jax.jit, static_argnames=("room", "parts"))
def _members(words: jax.Array, first: jax.Array, room: int, parts: Any) -> jax.Array:
    return _support.members(words, first, room, parts)


@pytest.mark.quick(1)
@pytest.mark.parametrize("density", [0.0, slow(0.03), 0.5, 1.0])
@pytest.mark.parametrize("room", [1, slow(7), 64, 1000])
def test_windows_of_members_are_all_of_them_once(density: float, room: int) -> None:
    mask = np.random.default_rng(1).random(777) < density
    parts = _support.Parts(777, 1, 777)
    words = _bits.pack_bits(jnp.asarray(mask))
    members = functools.partial(_members, room=room, parts=parts)
    found = np.concatenate(
        [members(words, jnp.int32(first)) for first in range(0, max(mask.sum(), 1), room)]
    )
    there, missing = found[found < 777], found[found >= 777]
    assert sorted(there) == list(np.flatnonzero(mask)) and (missing == 777).all()
    # What is missing comes last.
    assert (np.flatnonzero(found < 777) == np.arange(there.size)).all()


def test_rows_need_two_axes() -> None:
    with pytest.raises(ValueError, match="two axes or more"):
        _support.parts_of((5,), "row")
