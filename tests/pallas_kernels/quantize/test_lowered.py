"""Programs with `quantize` and `dequantize`, lowered for devices that are not here."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.quantize import dequantize, quantize
from tests.pallas_kernels.lowering import CALLS, lowered, on
from tests.pallas_kernels.quantize.oracle import BY_WIDTH, Case
from tests.slow import slow

NAMES = {"tpu": "mosaic_tpu", "cuda": "mosaic_gpu"}


def round_trip(
    x: jax.Array, scale: jax.Array, seeds: jax.Array, case: Case, implementation: Any
) -> tuple[jax.Array, jax.Array]:
    """Both kernels, with a residual and an accumulator."""
    options = {**case._asdict(), "implementation": implementation}
    codes, rest = quantize(x, scale, seeds, residual=True, **options)
    accumulate = jnp.ones(x.shape)
    return dequantize(codes, scale, shape=x.shape, accumulate=accumulate, **options), rest


def types(*batch: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> list[Any]:
    return [
        jax.ShapeDtypeStruct((*batch, *shape), dtype),
        jax.ShapeDtypeStruct(batch, jnp.float32),
        jax.ShapeDtypeStruct((*batch, 2), jnp.uint32),
    ]


def calls(text: str, platform: str) -> int:
    return text.count(f"@{CALLS[platform]}")


@pytest.mark.quick(5)
@pytest.mark.parametrize("platform", NAMES)
@pytest.mark.parametrize("case", BY_WIDTH, ids=str)
def test_every_width(platform: str, case: Case) -> None:
    f = functools.partial(round_trip, case=case, implementation=NAMES[platform])
    assert calls(lowered(f, *types(shape=(2**18 - 77,)), platform=platform), platform) == 2


@pytest.mark.quick(2)
@pytest.mark.parametrize("platform", NAMES)
@pytest.mark.parametrize("dtype", [jnp.float32, slow(jnp.bfloat16)])
@pytest.mark.parametrize(
    "shape", [(), slow((1,)), (129,), (256, 1152), slow((2**26,)), (2**31 - 1,)], ids=str
)
def test_every_shape(platform: str, dtype: Any, shape: tuple[int, ...]) -> None:
    for case in (Case(127, 8), Case(7, 4)):
        f = functools.partial(round_trip, case=case, implementation=NAMES[platform])
        assert calls(lowered(f, *types(shape=shape, dtype=dtype), platform=platform), platform) == 2


@pytest.mark.parametrize("platform", NAMES)
@pytest.mark.parametrize(("case", "size"), [(Case(7, 4), 5000), (Case(127, 8), 2**13)], ids=str)
def test_under_vmap_and_scan(platform: str, case: Case, size: int) -> None:
    f = jax.vmap(functools.partial(round_trip, case=case, implementation=NAMES[platform]))
    scanned = lambda *args: jax.lax.scan(lambda _, row: (None, f(*row)), None, args)[1]  # noqa: E731
    assert calls(lowered(scanned, *types(2, 3, shape=(size,)), platform=platform), platform) == 2


@pytest.mark.parametrize("platform", NAMES)
def test_in_a_checked_shard_map(platform: str) -> None:
    def worker(x: jax.Array, scale: jax.Array, seeds: jax.Array) -> jax.Array:
        options = {"levels": 3, "bits": 8, "implementation": NAMES[platform]}
        codes = quantize(x, scale, seeds[0], **options)
        return dequantize(jax.lax.psum(codes, "w"), scale, count=4, shape=x.shape, **options)

    x, scale, _ = types(shape=(4 * 5000,))
    seeds = jax.ShapeDtypeStruct((4, 2), jnp.uint32)
    with on(platform, w=4) as mesh:
        f = jax.shard_map(worker, mesh=mesh, in_specs=(P("w"), P(), P("w")), out_specs=P())
        traced = jax.jit(f).trace(x, scale, seeds)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert calls(text, platform) == 2
    assert "stablehlo.all_reduce" in text and "tensor<5000xi8>" in text


@pytest.mark.parametrize("platform", NAMES)
@pytest.mark.parametrize("size", [2**10, 2**18])
@pytest.mark.parametrize(("bits", "kernels"), [(8, 1), (4, 2)])
def test_what_is_assumed_to_be_faster(platform: str, size: int, bits: int, kernels: int) -> None:
    """No GPU takes the kernel by itself, no device one for a small array or for unpacked codes."""
    f = functools.partial(round_trip, case=Case(7, bits), implementation=None)
    expected = kernels if (platform, size) == ("tpu", 2**18) else 0
    assert calls(lowered(f, *types(shape=(size,)), platform=platform), platform) == expected


def test_the_gpu_counts_in_int32() -> None:
    f = functools.partial(round_trip, case=Case(127, 8), implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="int32"):
        lowered(f, *types(shape=(2**31,)), platform="cuda")
