"""Kernels of the tiles, interpreted, against the reference, and lowered."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import count_sketch
from pallas_kernels.count_sketch import mosaic_gpu, mosaic_tpu, reference
from tests.pallas_kernels.lowering import CALLS, INTERPRET_GPU, INTERPRET_TPU, lowered

KERNELS: dict[str, tuple[Any, Any]] = {
    "tpu": (mosaic_tpu, INTERPRET_TPU),
    "cuda": (mosaic_gpu, INTERPRET_GPU),
}
SEEDS = jnp.array([2**32 - 7, 12345], jnp.uint32)


def assert_equal_to_reference(
    platform: str,
    x: jax.Array,
    rows: int,
    columns: int,
    planes: int,
    estimate: str,
    step: int = 128,
    config: Any = None,
) -> None:
    kernels, interpret = KERNELS[platform]
    sizes = {"rows": rows, "columns": columns, "planes": planes, "step": step}
    encode = functools.partial(kernels.encode, **sizes, config=config, interpret=interpret)
    table = jax.jit(encode)(x, SEEDS)
    expected = jax.jit(functools.partial(reference.encode, **sizes))(x, SEEDS)
    np.testing.assert_array_equal(table, expected, strict=True)  # In the same order.
    options = {"shape": x.shape, "estimate": estimate, "planes": planes}
    decode = functools.partial(kernels.decode, **options, interpret=interpret)
    result = jax.jit(decode)(expected, SEEDS)
    decoded = jax.jit(functools.partial(reference.decode, **options))(expected, SEEDS)
    np.testing.assert_array_equal(result, decoded, strict=True)


def array(size: int, dtype: Any) -> jax.Array:
    """Normal numbers, or int32 of the whole range."""
    if dtype == jnp.int32:
        words = np.random.default_rng(0).integers(-(2**31), 2**31, size)
        return jnp.asarray(words.astype(np.int32))
    return jnp.asarray(np.random.default_rng(0).normal(size=size), jnp.float32).astype(dtype)


CASES = [
    (1, jnp.float32, 2, 1024, 1, "mean"),
    (5000, jnp.float32, 1, 2 * 2048, 2, "median"),  # The last tile is half empty.
    (7001, jnp.int32, 1, 1024, 1, "median"),  # Seven rounds: stages are used twice.
    (26_000, jnp.float32, 1, 1024, 1, "median", 2),  # Three parts of ten rounds, the last of six.
    (70_000, jnp.float32, 1, 3 * 1024, 1, "mean", 1),  # Steps of one tile, two parts.
    (129, jnp.bfloat16, 2, 2048, 1, "sum"),
    (5000, jnp.float32, 3, 3 * 1024, 1, "median"),  # Two rounds, of which one has two tiles.
    (3000, jnp.int32, 2, 7 * 1024, 1, "median"),  # More slots than tiles.
    (20_000, jnp.float32, 2, 16_384, 16, "mean"),  # Two rounds.
    (40_000, jnp.float32, 1, 32_768, 32, "median"),
    # Of 40 planes: five tiles of 8, of which three are added at once, and tiles that are not.
    (40_000, jnp.float32, 2, 3 * 8192, 8, "mean"),
    (30_000, jnp.int32, 1, 8 * 2048, 2, "mean"),  # Eight of 15 tiles at once.
    (30_000, jnp.float32, 1, 7 * 1024, 1, "sum"),  # 14 at once: signs begin within a word.
    (20_000, jnp.float32, 1, 7 * 1024, 1, "mean", 4),  # Steps of four of seven tiles.
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("platform", KERNELS)
def test_kernels_are_the_reference(platform: str, case: Any) -> None:
    size, dtype, *sizes = case
    assert_equal_to_reference(platform, array(size, dtype), *sizes)


@pytest.mark.slow
def test_a_table_that_does_not_fit_is_made_in_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three slots in each of two rows, two fit at once; `decode` reads a slot at a time."""
    monkeypatch.setattr(mosaic_tpu, "fits", lambda rows, columns: False)
    x, config = array(9000, jnp.float32), mosaic_tpu.Config(cells=2 * 1024)
    assert_equal_to_reference("tpu", x, 2, 3 * 1024, 1, "mean", config=config)


@pytest.mark.slow
@pytest.mark.parametrize("platform", KERNELS)
def test_nan_and_infinity(platform: str) -> None:
    x = array(1500, jnp.float32).at[3].set(jnp.nan).at[700].set(-jnp.inf).at[1400].set(1e-40)
    assert_equal_to_reference(platform, x, 1, 1024, 1, "median")


@pytest.mark.slow
@pytest.mark.parametrize("platform", KERNELS)
def test_batches_with_separate_seeds_on_a_mesh(platform: str) -> None:
    kernels, interpret = KERNELS[platform]
    x = jnp.stack([array(1101, jnp.float32), -array(1101, jnp.float32)])
    seeds = jnp.stack([SEEDS, SEEDS + 1])

    def round_trip(module: Any, x: jax.Array, seeds: jax.Array, **interpret: Any) -> jax.Array:
        table = module.encode(x, seeds, rows=1, columns=1024, **interpret)
        return module.decode(table, seeds, shape=x.shape, estimate="mean", **interpret)

    of_kernels = functools.partial(round_trip, kernels, interpret=interpret)
    of_reference = jax.jit(functools.partial(round_trip, reference))
    expected = jnp.stack([of_reference(*args) for args in zip(x, seeds, strict=True)])
    np.testing.assert_array_equal(jax.jit(jax.vmap(of_kernels))(x, seeds), expected)
    mesh = jax.make_mesh((1,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P("workers"), P()), "out_specs": P("workers")}
    on_mesh = jax.jit(jax.shard_map(lambda x, s: of_kernels(x[0], s)[None], mesh=mesh, **specs))
    np.testing.assert_array_equal(on_mesh(x[:1], seeds[0]), expected[:1])


@pytest.mark.slow
@pytest.mark.parametrize("platform", KERNELS)
def test_batches_with_shared_seeds_lower(platform: str) -> None:
    """Of a number of columns that is no power of two."""

    def round_trip(x: jax.Array, seeds: jax.Array) -> jax.Array:
        table = count_sketch.encode(x, seeds, rows=2, columns=98 * 1024)
        return count_sketch.decode(table, seeds, shape=x.shape)

    x = jax.ShapeDtypeStruct((2, 2**20 + 5), jnp.float32)
    seeds = jax.ShapeDtypeStruct((2,), jnp.uint32)
    text = lowered(jax.vmap(round_trip, (0, None)), x, seeds, platform=platform)
    assert text.count(f"@{CALLS[platform]}") == 2
