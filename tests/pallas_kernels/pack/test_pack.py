"""Fields of words: the reference is what the formula says, and wrong arguments are told so."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.pack import bits_for_sum, pack, unpack
from tests.slow import slow

WIDTHS = (*range(1, 17), 32)
SIZES = (1, 31, 129, 1000)


def words_of(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Every number at its field, by arithmetic alone."""
    numbers = numbers.ravel().astype(np.uint64)
    words = np.zeros(-(-len(numbers) // (32 // bits)), np.uint64)
    for j, number in enumerate(numbers):
        words[j % len(words)] += number * np.uint64(2 ** (bits * (j // len(words))))
    return words.astype(np.uint32)


def numbers_below(limit: int, size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, limit, size, dtype=np.uint64).astype(np.uint32)


@pytest.mark.quick(2)
@pytest.mark.parametrize("bits", [b if b in (1, 3, 7, 8, 16, 32) else slow(b) for b in WIDTHS])
def test_words_are_those_of_the_formula(bits):
    @jax.jit
    def there_and_back(numbers):
        words = pack(numbers, bits=bits)
        return words, unpack(words, bits=bits, shape=numbers.shape)

    for size in SIZES:
        numbers = numbers_below(2**bits, size)
        words, again = there_and_back(jnp.asarray(numbers))
        np.testing.assert_array_equal(words, words_of(numbers, bits))
        np.testing.assert_array_equal(again, numbers)


def test_the_layout_stays():
    """What is on the wire and in checkpoints of words, word by word."""
    numbers = jnp.arange(1, 12, dtype=jnp.uint32)
    assert [hex(word) for word in pack(numbers, bits=4)] == ["0xb97531", "0xa8642"]
    words = [hex(word) for word in pack(numbers, bits=10)]
    assert words == ["0x901401", "0xa01802", "0xb01c03", "0x2004"]
    assert [hex(word) for word in pack(numbers % 2 == 1, bits=1)] == ["0x555"]


@pytest.mark.parametrize("dtype", ["bool", "uint8"])
def test_narrow_dtypes_are_packed_as_wide_ones(dtype):
    bits = {"bool": 1, "uint8": 8}[dtype]
    numbers = numbers_below(2**bits, 777)
    packed = pack(jnp.asarray(numbers.astype(dtype)), bits=bits)
    np.testing.assert_array_equal(packed, words_of(numbers, bits))


def test_shapes_are_kept():
    numbers = numbers_below(16, 210).reshape(2, 7, 15)
    packed = pack(jnp.asarray(numbers), bits=4)
    np.testing.assert_array_equal(packed, words_of(numbers, 4))
    np.testing.assert_array_equal(unpack(packed, bits=4, shape=numbers.shape), numbers)
    assert unpack(pack(jnp.uint32(5), bits=3), bits=3, shape=()) == 5


@pytest.mark.parametrize("bits", [1, 3, 8, 32])
def test_nothing_is_packed_to_nothing(bits):
    packed = pack(jnp.zeros((3, 0), jnp.uint32), bits=bits)
    assert packed.shape == (0,) and packed.dtype == jnp.uint32
    assert unpack(packed, bits=bits, shape=(3, 0)).shape == (3, 0)


@pytest.mark.parametrize("largest,workers", [(1, 8), (1, 255), (6, 5), (254, 2), (2**16 - 1, 1)])
def test_sums_of_words_are_words_of_sums(largest, workers):
    bits = bits_for_sum(largest, workers)
    numbers = np.stack([numbers_below(largest + 1, 500, seed) for seed in range(workers)])
    numbers[:, 17] = largest
    pack_each = jax.vmap(functools.partial(pack, bits=bits))
    words = jnp.sum(pack_each(jnp.asarray(numbers)), axis=0, dtype=jnp.uint32)
    np.testing.assert_array_equal(unpack(words, bits=bits, shape=(500,)), numbers.sum(axis=0))


@pytest.mark.parametrize("largest,workers", [(1, 1), (1, 8), (254, 2), (2**15, 2), (2**32 - 1, 1)])
def test_width_for_a_sum_is_the_smallest(largest, workers):
    bits = bits_for_sum(largest, workers)
    assert largest * workers < 2**bits
    assert all(largest * workers >= 2**narrower for narrower in WIDTHS if narrower < bits)


def test_words_pass_through_scan_and_jit():
    numbers = jnp.asarray(numbers_below(16, 300)).reshape(3, 100)

    @jax.jit
    def round_trips(rows):
        through = lambda _, row: (None, unpack(pack(row, bits=4), bits=4, shape=(100,)))  # noqa: E731
        return jax.lax.scan(through, None, rows)[1]

    np.testing.assert_array_equal(round_trips(numbers), numbers)


def test_donated_words_are_unpacked():
    words = pack(jnp.asarray(numbers_below(2**32, 64)), bits=32)
    expected = np.array(words)
    unpack_donated = jax.jit(
        functools.partial(unpack, bits=32, shape=(64,)), donate_argnames="packed"
    )
    np.testing.assert_array_equal(unpack_donated(packed=words), expected)


@pytest.mark.parametrize(
    "call,error,message",
    [
        (lambda x: pack(x, bits=0), ValueError, "`bits`.*got 0"),
        (lambda x: pack(x, bits=17), ValueError, "`bits`.*got 17"),
        (lambda x: pack(x.astype(jnp.int32), bits=4), ValueError, "`numbers`.*got int32"),
        (lambda x: unpack(x, bits=17, shape=(8,)), ValueError, "`bits`.*got 17"),
        (lambda x: unpack(x, bits=4, shape=(65,)), ValueError, r"`packed` must be uint32\[9\]"),
        (lambda x: unpack(x.astype(jnp.int32), bits=4, shape=(64,)), ValueError, "got int32"),
        (lambda x: pack(x, bits=4, implementation="cuda"), ValueError, "`implementation`"),
        (lambda x: pack(x, bits=4, implementation="mosaic_gpu"), NotImplementedError, "runs on"),
        (
            lambda x: unpack(x, bits=4, shape=(64,), implementation="mosaic_tpu"),
            NotImplementedError,
            "it runs on tpu",
        ),
        (lambda x: bits_for_sum(0, 2), ValueError, "`largest` must be at least 1"),
        (lambda x: bits_for_sum(1, 0), ValueError, "`workers` must be at least 1"),
        (lambda x: bits_for_sum(2**31, 2), ValueError, "does not fit in 32 bits"),
    ],
)
def test_wrong_arguments_are_told(call, error, message):
    with pytest.raises(error, match=message):
        call(jnp.zeros(8, jnp.uint32))


def test_more_numbers_than_are_counted_are_an_error():
    with pytest.raises(ValueError, match=r"2\*\*32 elements"):
        jax.eval_shape(
            functools.partial(pack, bits=1), jax.ShapeDtypeStruct((2**16, 2**16), jnp.bool)
        )
    words = jax.eval_shape(
        functools.partial(pack, bits=1), jax.ShapeDtypeStruct((2**16, 2**16 - 1), jnp.bool)
    )
    assert words.shape == (2**27 - 2**11,)
