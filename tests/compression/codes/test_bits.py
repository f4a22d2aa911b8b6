"""Every bit of the three codes, against coders that write one bit after the other."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm import Codec, Context, Fast
from jaxcomm.compression import _bits
from jaxcomm.compression._bits import Alphabet, Integers
from jaxcomm.compression.codes import elias, golomb_rice, rans
from tests import bit_by_bit
from tests.slow import slow

SIZE = 2100  # three rows of 1,024 at most, two of 2,048


class Plain(NamedTuple):
    """Integers as they are."""

    integers: jax.Array


def plain(low: int, high: int, kind: Any = "levels", count: int | None = None) -> Codec:
    """A codec whose integers are those of its input, which hold them as floats."""

    def encode(context: Context, x: jax.Array) -> Any:
        return Plain(x.astype(jnp.int32)[:count]), context.memory

    def decode(context: Context, payload: Plain) -> jax.Array:
        values = payload.integers.astype(jnp.float32)
        return jnp.pad(values, (0, math.prod(context.shape) - values.size))

    integers = Integers(
        kind,
        lambda context: Alphabet(math.prod(context.shape) if count is None else count, low, high),
        split=lambda context, payload: (payload.integers, ()),
        join=lambda context, integers, rest: Plain(integers),
    )
    return Codec(encode=encode, decode=decode, fast=Fast(integers=integers))


def levels(low: int, high: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    places, uniform = np.arange(SIZE), rng.integers(low, high + 1, SIZE)
    rows = [
        np.full(SIZE, high),
        np.zeros(SIZE),
        np.where(places == 1500, low, 0),
        np.where(places % 2, low, high),
        np.where(places < 1050, uniform, 0),
        np.rint(rng.normal(size=SIZE) * high / 4),
        np.where(rng.random(SIZE) < 0.01, rng.choice([-1, 1], SIZE), 0),
        uniform,
    ]
    return np.clip(np.array(rows), low, high).astype(np.float32)


@functools.cache
def both(codec: Codec) -> Any:
    """Payloads and what they decode to, of rows of integers."""

    def one(x: jax.Array) -> Any:
        context = Context.of(x, memory=codec.init(x))
        payload, memory = codec.encode(context, x)
        return payload, codec.decode(context.received(), payload), memory.report.overflow

    return jax.jit(jax.vmap(one))


LARGE_CAPACITY = {"capacity": 64.0}
PREFIX = {
    "elias": (elias, bit_by_bit.elias_levels, bit_by_bit.elias_gaps),
    "golomb_rice": (golomb_rice, bit_by_bit.rice_levels, bit_by_bit.rice_gaps),
}


def require_words(payload: Any, which: int, headers: list[int], words: list[int]) -> None:
    found = _bits.unpack_numbers(payload.headers[which], 16, len(headers))
    np.testing.assert_array_equal(found, headers)
    np.testing.assert_array_equal(payload.words[which][: len(words)], words)
    assert not np.any(payload.words[which][len(words) :])


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("elias", -7, 7),
        slow("elias", -1024, 1024),
        slow("elias", -(2**23), 2**23),
        slow("golomb_rice", -1, 1),
        slow("golomb_rice", -128, 127),
        slow("golomb_rice", -1023, 1023),
    ],
)
def test_levels(name: str, low: int, high: int) -> None:
    code, oracle, _ = PREFIX[name]
    given = levels(low, high)
    payload, decoded, dropped = both(code(plain(low, high), **LARGE_CAPACITY))(given)
    np.testing.assert_array_equal(decoded, given)
    assert not np.any(dropped)
    for which, row in enumerate(given.astype(int).tolist()):
        require_words(payload, which, *bit_by_bit.coded(row, oracle, low, high))


@pytest.mark.slow
@pytest.mark.parametrize("name", PREFIX)
def test_gaps(name: str) -> None:
    code, _, oracle = PREFIX[name]
    rng, most = np.random.default_rng(1), 2**24 - 1
    given = [
        np.arange(SIZE),
        most - SIZE + 1 + np.arange(SIZE),
        np.sort(rng.choice(20 * SIZE, SIZE, replace=False)),
        np.sort(rng.choice(most, SIZE, replace=False)),
        np.sort(np.r_[np.arange(SIZE - 5), most - 2 * np.arange(5)]),
        np.sort(np.unique(np.floor(2 ** rng.uniform(0, 24, 9 * SIZE)))[:SIZE]),
    ]
    given = np.array([x.astype(np.float32) for x in given])
    codec = code(plain(0, most, "indices", SIZE), **LARGE_CAPACITY)
    payload, decoded, _ = both(codec)(given)
    np.testing.assert_array_equal(decoded, given)
    for which, row in enumerate(given.astype(int)):
        gaps = (np.diff(row, prepend=-1) - 1).tolist()
        require_words(payload, which, *bit_by_bit.coded(gaps, oracle, 0, most))


@pytest.mark.slow
@pytest.mark.parametrize(("low", "high"), [(-7, 7), (-1, 1), (-1024, 1023)])
def test_rans(low: int, high: int) -> None:
    given, rows = levels(low, high), 2
    payload, decoded, _ = both(rans(plain(low, high), **LARGE_CAPACITY))(given)
    np.testing.assert_array_equal(decoded, given)
    width = (high - low).bit_length()
    for which, row in enumerate(given.astype(int).tolist()):
        counts = np.asarray(_bits.unpack_numbers(payload.table[which], 16, high - low + 1))
        counted = np.bincount(np.array(row) - low, minlength=high - low + 1)
        assert counts.sum() == 2**14 and np.all((counts > 0) == (counted > 0))
        headers = np.asarray(_bits.unpack_numbers(payload.headers[which], 16, rows))
        equal = [2 ** (14 - width)] * 2**width
        words, plain_rows = [], headers >> 11 == bit_by_bit.PLAIN
        for values, is_plain in zip(bit_by_bit.rows_of(row, 2048), plain_rows, strict=True):
            words += bit_by_bit.rans_row(values, equal if is_plain else counts.tolist(), low)
        require_words(payload, which, headers.tolist(), words)
        assert sum(headers & 2047) == len(words)


@pytest.mark.slow
@pytest.mark.parametrize("code", [elias, golomb_rice, rans], ids=lambda code: code.__name__)
@pytest.mark.parametrize("size", [0, 1, 33, 1025, 4097])
def test_sizes(code: Any, size: int) -> None:
    given = np.random.default_rng(size).integers(-7, 8, (2, size)).astype(np.float32)
    _, decoded, dropped = both(code(plain(-7, 7), **LARGE_CAPACITY))(given)
    np.testing.assert_array_equal(decoded, given)
    assert not np.any(dropped)


@pytest.mark.slow
@pytest.mark.parametrize("code", [elias, golomb_rice], ids=lambda code: code.__name__)
def test_the_largest_integers(code: Any) -> None:
    most = 2**30 - 64
    given = np.float32([[most, -most, 0, 1, -1, most // 2, 2**20, -5] * 9])
    _, decoded, _ = both(code(plain(-(2**30) + 1, 2**30 - 1), **LARGE_CAPACITY))(given)
    np.testing.assert_array_equal(decoded, given)
    with pytest.raises(ValueError, match="at most 2147483647 levels, but the codec has 2147483649"):
        both(code(plain(-(2**30), 2**30), **LARGE_CAPACITY))(given)


def test_rans_with_states_that_are_powers_of_two() -> None:
    """Half of the 4,096 integers are the first level, and the first row ends with many of them."""
    others = np.random.default_rng(0).integers(-6, 8, 2048)
    row = np.random.default_rng(1).permutation(np.r_[np.full(1948, -7), others])
    given = np.insert(row, 1948, np.full(100, -7))[None].astype(np.float32)
    payload, decoded, _ = both(rans(plain(-7, 7), **LARGE_CAPACITY))(given)
    assert _bits.unpack_numbers(payload.table[0], 16, 15)[0] == 2**13
    np.testing.assert_array_equal(decoded, given)
