"""Both families against sketches made one element at a time in NumPy."""

from inspect import signature

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import count_sketch
from pallas_kernels.count_sketch import elements, reference
from pallas_kernels.count_sketch.reference import median
from tests.pallas_kernels.count_sketch import oracle
from tests.slow import slow

SEEDS = (2**32 - 3, 77)
SEEDS_ARRAY = jnp.array(SEEDS, jnp.uint32)


# Compiled as a whole, which is faster than one operation after the other.
STATIC = ("rows", "columns", "planes", "step", "shape", "estimate", "hashing")
encode, encode_tiles, encode_elements, decode, decode_tiles, decode_elements = (
    jax.jit(f, static_argnames=[name for name in STATIC if name in signature(f).parameters])
    for f in (
        count_sketch.encode,
        reference.encode,
        elements.encode,
        count_sketch.decode,
        reference.decode,
        elements.decode,
    )
)


def normal(size: int, seed: int = 0) -> np.ndarray:
    """Standard normal numbers, float32."""
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def integers(size: int) -> np.ndarray:
    """int32 of the whole range."""
    return np.random.default_rng(1).integers(-(2**31), 2**31, size).astype(np.int32)


# Size, rows, columns, planes of a tile, planes of a step: 7, 2, 1, 1, 2, 2 and 40 rounds, of which
# the last ones are in four parts.
TILES = [
    (7000, 1, 1024, 1, 128),
    slow(7000, 3, 5 * 1024, 1, 128),
    (300, 2, 1024, 1, 128),
    slow(3000, 4, 7 * 1024, 1, 128),
    slow(20_000, 2, 3 * 4096, 4, 128),
    (40_000, 1, 32_768, 32, 128),
    slow(100_000, 1, 3 * 1024, 1, 8),
]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "rows", "columns", "planes", "step"), TILES)
def test_tiles_are_the_oracle(size: int, rows: int, columns: int, planes: int, step: int) -> None:
    places = oracle.by_tiles(size, SEEDS, rows, columns, planes)
    x = normal(size)
    sizes = {"rows": rows, "columns": columns, "planes": planes, "step": step}
    table = encode_tiles(x, SEEDS_ARRAY, **sizes)
    expected = oracle.table_by_tiles(x, places, columns, planes, step)
    np.testing.assert_array_equal(table, expected, strict=True)  # The order of sums is defined.
    # They collide, unless each tile has a place of its own.
    assert (np.abs(expected) > 0).sum() < rows * size or columns >= size

    whole = integers(size)
    sums = encode_tiles(whole, SEEDS_ARRAY, **sizes)
    exact = oracle.table(whole.astype(np.int64), places, columns)
    np.testing.assert_array_equal(sums, exact.astype(np.int32), strict=True)  # Modulo 2**32.

    for sketch in (table, sums):
        values = oracle.estimates(np.asarray(sketch), places)
        options = {"shape": (size,), "planes": planes}
        result = decode_tiles(sketch, SEEDS_ARRAY, estimate="median", **options)
        np.testing.assert_array_equal(result, oracle.median(values), strict=True)
        mean = decode_tiles(sketch, SEEDS_ARRAY, estimate="mean", **options)
        bound = 1e-6 * np.abs(values.astype(np.float64)).sum(axis=0) + 1e-30
        assert mean.dtype == jnp.float32
        assert (np.abs(mean - values.astype(np.float64).mean(axis=0)) <= bound).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "rows", "columns"),
    [(2000, 2, 37), (1, 1, 2**30 + 7), slow(2000, 3, 2500), slow(500, 4, 1)],
)
def test_elements_are_the_oracle(size: int, rows: int, columns: int) -> None:
    places = oracle.by_elements(size, SEEDS, rows, columns)
    column, sign = count_sketch.locations(jnp.arange(size), SEEDS_ARRAY, rows=rows, columns=columns)
    np.testing.assert_array_equal(column, np.stack([c for c, _ in places]))
    np.testing.assert_array_equal(sign, np.stack([s for _, s in places]))
    if columns > 2**20:
        return
    whole = integers(size)
    options = {"rows": rows, "columns": columns}
    sums = encode_elements(whole, SEEDS_ARRAY, **options)
    exact = oracle.table(whole.astype(np.int64), places, columns)
    np.testing.assert_array_equal(sums, exact.astype(np.int32), strict=True)

    x = normal(size)
    table = encode_elements(x, SEEDS_ARRAY, **options)
    expected = oracle.table(x.astype(np.float64), places, columns)
    for row, (column, _) in enumerate(places):
        counts = np.bincount(column, minlength=columns)
        bound = counts * np.abs(x).max() * counts.max() * 2.0**-29
        bound += np.abs(expected[row]) * 2.0**-23
        assert (np.abs(table[row] - expected[row]) <= bound).all()

    values = oracle.estimates(np.asarray(table), places)
    result = decode_elements(table, SEEDS_ARRAY, shape=(size,), estimate="median")
    np.testing.assert_array_equal(result, oracle.median(values), strict=True)


def test_sums_of_floats_do_not_depend_on_their_order() -> None:
    # Element and sign are hashed of the position: permute what collides, in one column.
    x = normal(4096) * 10.0 ** np.random.default_rng(2).integers(-6, 6, 4096)
    x = x.astype(np.float32)
    _, sign = count_sketch.locations(jnp.arange(4096), SEEDS_ARRAY, rows=1, columns=1)
    sign = np.asarray(sign[0], np.float32)
    options = {"rows": 1, "columns": 1}
    one_way = encode_elements(x * sign, SEEDS_ARRAY, **options)
    other_way = encode_elements(x[::-1] * sign, SEEDS_ARRAY, **options)
    assert float(one_way[0, 0]) == float(other_way[0, 0])
    assert np.float32(np.sum(x)) != np.float32(np.cumsum(x[::-1])[-1])  # Floats would.


@pytest.mark.parametrize("size", [1000, slow(1), slow(3)])
def test_fixed_point_neither_overflows_nor_vanishes(size: int) -> None:
    # All of one sign in one column: the largest sum there is.
    _, sign = count_sketch.locations(jnp.arange(size), SEEDS_ARRAY, rows=1, columns=1)
    for scale in (1e-34, 1e-30, 1.0, 1e30, 3e38):
        x = np.asarray(sign[0], np.float32) * np.float32(scale / size)
        table = encode_elements(jnp.asarray(x), SEEDS_ARRAY, rows=1, columns=1)
        np.testing.assert_allclose(table[0, 0], np.float32(scale), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("hashing", ["tiles", "elements"])
def test_subnormal_zero_and_bfloat16(hashing: str) -> None:
    options = {"rows": 2, "columns": 1024, "hashing": hashing}
    tiny = jnp.full((3000,), 1e-40, jnp.float32)
    table = encode(tiny, SEEDS_ARRAY, **options)
    assert (jnp.abs(table) <= 3e-40).all()  # Added, or flushed.
    table = encode(jnp.zeros(3000), SEEDS_ARRAY, **options)
    assert (table == 0).all() and not jnp.signbit(table).any()
    x = jnp.asarray(normal(3000)).astype(jnp.bfloat16)
    narrow = encode(x, SEEDS_ARRAY, **options)
    assert narrow.dtype == jnp.float32
    wide = encode(x.astype(jnp.float32), SEEDS_ARRAY, **options)
    np.testing.assert_array_equal(narrow, wide)


@pytest.mark.slow
@pytest.mark.parametrize("hashing", ["tiles", "elements"])
def test_nan_and_infinity_stay_in_their_columns(hashing: str) -> None:
    x = jnp.asarray(normal(6000))
    options = {"rows": 3, "columns": 1024, "hashing": hashing}
    where = {5: jnp.nan, 1234: jnp.inf, 4321: -jnp.inf}
    finite = x.at[jnp.array(list(where))].set(0)
    spoilt = x.at[jnp.array(list(where))].set(jnp.array(list(where.values())))
    table = encode(spoilt, SEEDS_ARRAY, **options)
    expected = encode(finite, SEEDS_ARRAY, **options)
    touched = ~jnp.isfinite(table)
    np.testing.assert_array_equal(touched.sum(axis=1), [3, 3, 3])
    np.testing.assert_array_equal(jnp.where(touched, 0, table), jnp.where(touched, 0, expected))
    for estimate in ("mean", "median"):
        result = decode(table, SEEDS_ARRAY, shape=(6000,), hashing=hashing, estimate=estimate)
        assert jnp.isnan(result[5])
        assert result[1234] == jnp.inf and result[4321] == -jnp.inf


@pytest.mark.parametrize("rows", [3, 4, *map(slow, (1, 2, 5, 6, 7, 8, 9))])
def test_median_is_that_of_a_sort(rows: int) -> None:
    values = np.random.default_rng(rows).normal(size=(rows, 400)).astype(np.float32)
    values[:, :100] = np.round(values[:, :100])  # Ties.
    result = jax.jit(lambda v: median(list(v)))(values)
    np.testing.assert_array_equal(result, oracle.median(values))
    spoilt = values.copy()
    spoilt[rows // 2] = np.nan
    assert jnp.isnan(median([jnp.asarray(v) for v in spoilt])).all()
