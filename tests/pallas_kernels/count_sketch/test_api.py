"""Arguments, masks, linearity, gradients, transformations."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import count_sketch
from pallas_kernels.count_sketch.tiling import planes_of_tile
from tests.pallas_kernels.lowering import on
from tests.slow import slow

SEEDS = jnp.array([1, 2], jnp.uint32)
FAMILIES = [("tiles", 2048), ("elements", 777)]
encode = jax.jit(count_sketch.encode, static_argnames=("rows", "columns", "hashing"))
decode = jax.jit(count_sketch.decode, static_argnames=("shape", "estimate", "hashing"))


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


@pytest.mark.quick(2)
@pytest.mark.parametrize(("hashing", "columns"), FAMILIES)
@pytest.mark.parametrize(
    "shape", [(0,), (5, 7, 41), slow(()), slow((129,)), slow((1,)), slow((127,)), slow((3, 0))]
)
def test_shapes(shape: tuple[int, ...], hashing: Any, columns: int) -> None:
    x = jnp.ones(shape)
    table = encode(x, SEEDS, rows=3, columns=columns, hashing=hashing)
    assert table.shape == (3, columns) and table.dtype == jnp.float32
    for estimate in ("mean", "median"):
        result = decode(table, SEEDS, shape=shape, estimate=estimate, hashing=hashing)
        assert result.shape == shape and result.dtype == jnp.float32
    if x.size == 1 or hashing == "tiles":  # Nothing collides within a tile.
        np.testing.assert_allclose(result, x, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("hashing", "columns"), [FAMILIES[0], slow(*FAMILIES[1])])
def test_mask(hashing: Any, columns: int) -> None:
    x = normal(50, 100)
    mask = jnp.asarray(np.random.default_rng(1).random((50, 100)) < 0.3)
    options = {"rows": 3, "columns": columns, "hashing": hashing}
    table = encode(jnp.where(mask, x, jnp.nan), SEEDS, mask=mask, **options)
    expected = encode(jnp.where(mask, x, 0), SEEDS, **options)
    np.testing.assert_array_equal(table, expected)
    whole = decode(table, SEEDS, shape=x.shape, hashing=hashing)
    result = decode(table, SEEDS, shape=x.shape, hashing=hashing, mask=mask)
    np.testing.assert_array_equal(result, jnp.where(mask, whole, 0))
    assert not (result == 0).all()


@pytest.mark.parametrize(("hashing", "columns"), [slow(*FAMILIES[0]), FAMILIES[1]])
def test_tables_add_up(hashing: Any, columns: int) -> None:
    added = functools.partial(encode, seeds=SEEDS, rows=2, columns=columns, hashing=hashing)
    x, y = normal(4000), jnp.flip(normal(4000))
    np.testing.assert_allclose(added(x) + added(y), added(x + y), atol=1e-4)
    whole, other = ((1e9 * z).astype(jnp.int32) for z in (x, y))
    np.testing.assert_array_equal(added(whole) + added(other), added(whole + other))


@pytest.mark.slow
@pytest.mark.parametrize(("hashing", "columns"), [FAMILIES[0], slow(*FAMILIES[1])])
def test_gradients_are_the_transpose(hashing: Any, columns: int) -> None:
    x, cotangent = normal(30, 40), normal(3, columns)

    @jax.jit
    def encode(x: jax.Array) -> jax.Array:
        return count_sketch.encode(x, SEEDS, rows=3, columns=columns, hashing=hashing)

    @jax.jit
    def decode(table: jax.Array) -> jax.Array:
        return count_sketch.decode(table, SEEDS, shape=x.shape, hashing=hashing)

    table, transpose = jax.vjp(encode, x)
    (gradient,) = transpose(cotangent)
    np.testing.assert_allclose(gradient, 3 * decode(cotangent), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        np.vdot(gradient, x), np.vdot(cotangent, table), rtol=1e-3, atol=1e-3
    )
    (back,) = jax.vjp(decode, table)[1](x)
    np.testing.assert_allclose(3 * back, table, rtol=1e-5, atol=1e-5)
    narrow = jax.grad(lambda x: encode(x).sum())(x.astype(jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
    twice = jax.grad(lambda x: jnp.sum(jax.grad(lambda y: jnp.sum(encode(y) ** 2))(x)))(x)
    assert twice.shape == x.shape and (twice != 0).any()
    with pytest.raises(TypeError, match="median"):
        jax.grad(
            lambda t: count_sketch.decode(
                t, SEEDS, shape=(9,), estimate="median", hashing=hashing
            ).sum()
        )(table)


@pytest.mark.slow
@pytest.mark.parametrize(("hashing", "columns"), [FAMILIES[0], slow(*FAMILIES[1])])
def test_transformations(hashing: Any, columns: int) -> None:
    encode = jax.jit(
        functools.partial(count_sketch.encode, rows=2, columns=columns, hashing=hashing)
    )
    x = normal(8, 3000)
    seeds = jax.random.bits(jax.random.key(0), (8, 2), jnp.uint32)
    each = jnp.stack([encode(*pair) for pair in zip(x, seeds, strict=True)])
    np.testing.assert_array_equal(jax.vmap(encode)(x, seeds), each)
    _, scanned = jax.lax.scan(lambda carry, pair: (carry, encode(*pair)), None, (x, seeds))
    np.testing.assert_array_equal(scanned, each)
    mesh = jax.make_mesh((8,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        table = jax.lax.psum(encode(x[0], SEEDS), "workers")
        gradient = jax.grad(lambda x: jnp.sum(encode(x, SEEDS) ** 2))(x[0])
        mean = count_sketch.decode(table / 8, SEEDS, shape=x.shape[1:], hashing=hashing)
        return mean, gradient[None]

    specs = {"in_specs": P("workers"), "out_specs": (P(), P("workers"))}
    mean, gradient = jax.jit(jax.shard_map(step, mesh=mesh, **specs))(x)
    expected = decode(encode(x.mean(axis=0), SEEDS), SEEDS, shape=(3000,), hashing=hashing)
    np.testing.assert_allclose(mean, expected, atol=1e-5)
    assert gradient.shape == x.shape


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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": jnp.ones(3, jnp.float16)}, "`x` must be"),
        ({"seeds": jnp.ones(2, jnp.int32)}, "`seeds` must be"),
        ({"rows": 0}, "`rows` must be"),
        ({"rows": 33}, "`rows` must be"),
        ({"columns": 0}, "`columns` must be"),
        ({"columns": 1500}, "nearest is 1024, and .*elements"),
        ({"columns": 1600}, "nearest is 2048"),
        ({"columns": 5}, "nearest is 1024"),
        ({"hashing": "murmur"}, "`hashing` must be"),
        ({"mask": jnp.ones(3)}, "`mask` must be"),
        ({"mask": jnp.ones(4, bool)}, "`mask` must be"),
        ({"implementation": "cuda"}, "`implementation` must be"),
        ({"implementation": "cuda", "hashing": "elements"}, "`implementation` must be"),
    ],
)
def test_encode_refuses(change: dict[str, Any], words: str) -> None:
    options: dict[str, Any] = {"x": jnp.ones(3), "seeds": SEEDS, "rows": 1, "columns": 1024}
    with pytest.raises(ValueError, match=words):
        count_sketch.encode(**(options | change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"table": jnp.ones(1024)}, "`table` must be"),
        ({"table": jnp.ones((1, 1024), jnp.bfloat16)}, "`table` must be"),
        ({"table": jnp.ones((1, 1000))}, "`columns` must be"),
        ({"estimate": "sum"}, "`estimate` must be"),
        ({"mask": jnp.ones(4, bool)}, "`mask` must be"),
        ({"shape": (2**16, 2**16)}, "2\\*\\*32"),
    ],
)
def test_decode_refuses(change: dict[str, Any], words: str) -> None:
    options: dict[str, Any] = {"table": jnp.ones((1, 1024)), "seeds": SEEDS, "shape": (3,)}
    with pytest.raises(ValueError, match=words):
        count_sketch.decode(**(options | change))


def test_the_counter_does_not_wrap() -> None:
    encode = functools.partial(count_sketch.encode, rows=1, columns=1024)
    seeds = jax.ShapeDtypeStruct((2,), jnp.uint32)
    with pytest.raises(ValueError, match="2\\*\\*32"):
        jax.eval_shape(encode, jax.ShapeDtypeStruct((2**32,), jnp.float32), seeds)
    below = jax.ShapeDtypeStruct((2**16, 2**16 - 1), jnp.float32)
    assert jax.eval_shape(encode, below, seeds).shape == (1, 1024)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_kernels_refuse(platform: str) -> None:
    kernel: Any = {"tpu": "mosaic_tpu", "cuda": "mosaic_gpu"}[platform]
    seeds = jax.ShapeDtypeStruct((2,), jnp.uint32)
    x = jax.ShapeDtypeStruct((99,), jnp.float32)
    options = {"rows": 1, "columns": 1024, "implementation": kernel}
    with pytest.raises(NotImplementedError, match="cpu"):
        jax.eval_shape(functools.partial(count_sketch.encode, **options), x, seeds)
    with on(platform):
        by_elements = functools.partial(count_sketch.encode, hashing="elements", **options)
        with pytest.raises(NotImplementedError, match="no atomic addition at indices"):
            jax.eval_shape(by_elements, x, seeds)
        decode = functools.partial(count_sketch.decode, shape=(99,), implementation=kernel)
        with pytest.raises(NotImplementedError, match="at most 9 rows"):
            jax.eval_shape(decode, jax.ShapeDtypeStruct((10, 1024), jnp.float32), seeds)
        many = functools.partial(count_sketch.decode, shape=(2**17,))
        many_rows = jax.ShapeDtypeStruct((10, 1024), jnp.float32)
        assert jax.eval_shape(many, many_rows, seeds).shape == (2**17,)


@pytest.mark.parametrize(
    ("indices", "words"),
    [(jnp.ones(3), "`indices` must be"), (jnp.ones((3, 1), jnp.int32), "`indices` must be")],
)
def test_locations_refuses(indices: jax.Array, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        count_sketch.locations(indices, SEEDS, rows=1, columns=10)
