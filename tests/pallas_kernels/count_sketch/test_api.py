"""Shapes, masks, linearity and gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import count_sketch
from pallas_kernels.count_sketch.tiling import planes_of_tile
from tests.slow import slow

SEEDS = jnp.array([1, 2], jnp.uint32)
FAMILIES = [("tiles", 2048), ("elements", 777)]
encode = jax.jit(count_sketch.encode, static_argnames=("rows", "columns", "hashing"))
decode = jax.jit(count_sketch.decode, static_argnames=("shape", "estimate", "hashing"))


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


@pytest.mark.parametrize(("hashing", "columns"), FAMILIES)
@pytest.mark.parametrize("shape", [(5, 7, 41), *map(slow, [(0,), (), (1,), (3, 0)])], ids=str)
def test_shapes(shape: tuple[int, ...], hashing: Any, columns: int) -> None:
    x = jnp.ones(shape)
    table = encode(x, SEEDS, rows=3, columns=columns, hashing=hashing)
    assert table.shape == (3, columns) and table.dtype == jnp.float32
    for estimate in ("mean", "median"):
        result = decode(table, SEEDS, shape=shape, estimate=estimate, hashing=hashing)
        assert result.shape == shape and result.dtype == jnp.float32
        if x.size == 1 or hashing == "tiles":  # Nothing collides within a tile.
            np.testing.assert_allclose(result, x, rtol=1e-6)


@pytest.mark.parametrize(("hashing", "columns"), [slow(*FAMILIES[0]), FAMILIES[1]])
def test_masks_and_sums_of_tables(hashing: Any, columns: int) -> None:
    options = {"rows": 3, "columns": columns, "hashing": hashing}
    x, mask = normal(50, 100), jnp.arange(5000).reshape(50, 100) % 3 == 1
    table = encode(jnp.where(mask, x, jnp.nan), SEEDS, mask=mask, **options)
    others = encode(x, SEEDS, mask=~mask, **options)
    np.testing.assert_array_equal(table, encode(jnp.where(mask, x, 0), SEEDS, **options))
    np.testing.assert_allclose(table + others, encode(x, SEEDS, **options), atol=1e-4)
    whole = decode(table, SEEDS, shape=x.shape, hashing=hashing)
    result = decode(table, SEEDS, shape=x.shape, hashing=hashing, mask=mask)
    np.testing.assert_array_equal(result, jnp.where(mask, whole, 0))
    assert not (result == 0).all()
    x, y = ((1e9 * z).astype(jnp.int32) for z in (x, x[::-1]))
    np.testing.assert_array_equal(
        encode(x, SEEDS, **options) + encode(y, SEEDS, **options), encode(x + y, SEEDS, **options)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("hashing", "columns"), FAMILIES)
def test_gradients_are_the_transpose(hashing: Any, columns: int) -> None:
    x, cotangent = normal(30, 40), normal(3, columns)
    options = {"seeds": SEEDS, "hashing": hashing}
    to_table = jax.jit(functools.partial(count_sketch.encode, **options, rows=3, columns=columns))
    back = jax.jit(functools.partial(count_sketch.decode, **options, shape=x.shape))
    table, transpose = jax.vjp(to_table, x)
    (gradient,) = transpose(cotangent)
    np.testing.assert_allclose(gradient, 3 * back(cotangent), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        np.vdot(gradient, x), np.vdot(cotangent, table), rtol=1e-3, atol=1e-3
    )
    (of_back,) = jax.vjp(back, table)[1](x)
    np.testing.assert_allclose(3 * of_back, table, rtol=1e-5, atol=1e-5)
    narrow = jax.grad(lambda x: to_table(x).sum())(x.astype(jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
    twice = jax.grad(lambda x: jnp.sum(jax.grad(lambda y: jnp.sum(to_table(y) ** 2))(x)))(x)
    assert twice.shape == x.shape and (twice != 0).any()


@pytest.mark.slow
@pytest.mark.parametrize(("hashing", "columns"), FAMILIES)
def test_gradients_in_a_shard_map_that_checks_types(hashing: Any, columns: int) -> None:
    def square(x: jax.Array) -> jax.Array:
        table = count_sketch.encode(x, SEEDS, rows=2, columns=columns, hashing=hashing)
        return jnp.sum(count_sketch.decode(table, SEEDS, shape=x.shape, hashing=hashing) ** 2)

    x, gradient = normal(2, 3000), jax.vmap(jax.grad(square))
    mesh = jax.make_mesh((2,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,))
    on_mesh = jax.shard_map(gradient, mesh=mesh, in_specs=P("workers"), out_specs=P("workers"))
    np.testing.assert_allclose(jax.jit(on_mesh)(x), jax.jit(gradient)(x), rtol=1e-5, atol=1e-5)


def test_round_columns() -> None:
    for columns in [1, 1000, 1024, 1025, 16_384, 40_000, 100_000, 2**18, 10**6, 10**7]:
        rounded = count_sketch.round_columns(columns)
        assert rounded % 1024 == 0 and columns <= rounded < columns + 1024 + columns / 16
        assert count_sketch.round_columns(rounded) == rounded
        planes = planes_of_tile(rounded)
        assert rounded % (planes * 1024) == 0
        assert planes == 1 or rounded >= 8 * planes * 1024
    assert planes_of_tile(2**18) == 32 and planes_of_tile(2**14) == 2
    assert planes_of_tile(2**18 + 1024) == 1
