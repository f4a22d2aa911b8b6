"""Blocks of kernels for GPU: pieces without a race, and batches in parts of a launch each."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _gpu
from pallas_kernels._gpu import by_pieces, in_launches
from pallas_kernels.pack import pack
from tests.pallas_kernels.lowering import CALLS, INTERPRET_GPU, lowered
from tests.slow import slow

BLOCK, UNIT = 256, 128


def add_one(first: Any, count: int, x_ref: Any, out_ref: Any) -> None:
    here = pl.ds(first, count)
    out_ref[here] = x_ref[here] + 1


def run(kernel: Callable[..., None], length: int, blocks: int) -> jax.Array:
    x = jnp.arange(length, dtype=jnp.int32)
    out_type = jax.ShapeDtypeStruct((length,), jnp.int32)
    call = _gpu.gpu_kernel(
        kernel, out_type=out_type, grid={"block": blocks}, interpret=INTERPRET_GPU
    )
    out: jax.Array = jax.jit(call)(x)
    return out


@pytest.mark.parametrize("length", [577, slow(256), slow(257), slow(384)])
def test_every_number_is_written_without_a_race(length: int) -> None:
    out = run(by_pieces(length, BLOCK, UNIT, add_one), length, length // BLOCK)
    np.testing.assert_array_equal(out, np.arange(1, length + 1))


@pytest.mark.slow
def test_blocks_that_overlap_are_found() -> None:
    def kernel(*refs: Any) -> None:
        add_one(lax.min(lax.axis_index("block") * BLOCK, 577 - BLOCK), BLOCK, *refs)

    with pytest.raises(Exception, match=r"(?i)race"):
        run(kernel, 577, 3)


def recorded(grids: list[tuple[int, ...]], grid: tuple[int, ...]) -> Any:
    """A function of two arrays that is batched as Mosaic does, and notes its grids."""

    @jax.custom_batching.custom_vmap
    def kernel(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        grids.append(grid)
        return x + 10 * y, x - y

    @kernel.def_vmap
    def _rule(size: int, in_batched: Any, *operands: jax.Array) -> Any:
        axes = [0 if batched else None for batched in in_batched]
        whole = [
            a if axis == 0 else jnp.broadcast_to(a, (size, *a.shape))
            for a, axis in zip(operands, axes, strict=True)
        ]
        return recorded(grids, (size, *grid))(*whole), (True, True)

    return kernel


@pytest.mark.parametrize(
    ("grid", "size", "launched"),
    [
        ((9,), 4, {(4, 9)}),
        ((9,), 11, {(4, 9), (3, 9)}),
        ((2, 1, 9), 5, {(2, 2, 1, 9), (1, 2, 1, 9)}),
    ],
)
def test_a_batch_is_launched_in_parts(
    grid: tuple[int, ...], size: int, launched: set[tuple[int, ...]]
) -> None:
    grids: list[tuple[int, ...]] = []
    f = in_launches(recorded(grids, grid), grid, most=4)
    x, y = jnp.arange(3.0 * size).reshape(size, 3), jnp.arange(3.0)
    for result, expected in zip(
        jax.jit(jax.vmap(f, (0, None)))(x, y), (x + 10 * y[None], x - y[None]), strict=True
    ):
        np.testing.assert_array_equal(result, expected)
    assert set(grids) - {grid} == launched


def test_batches_of_batches_and_of_nothing() -> None:
    grids: list[tuple[int, ...]] = []
    f = in_launches(recorded(grids, (9,)), (9,), most=4)
    x, y = jnp.arange(7.0 * 6 * 3).reshape(7, 6, 3), jnp.arange(18.0).reshape(6, 3)
    both = jax.vmap(jax.vmap(f), (0, None))
    np.testing.assert_array_equal(jax.jit(both)(x, y)[0], x + 10 * y[None])
    assert grids and all(max(grid[:-1], default=0) <= 4 for grid in grids)
    grids.clear()
    f = in_launches(recorded(grids, (9,)), (9,))
    assert jax.vmap(lambda i: f(y[1], y[0])[0] + i)(jnp.arange(3.0)).shape == (3, 3)
    assert set(grids) == {(9,)}  # What is not batched is untouched.


@pytest.mark.slow
def test_a_kernel_is_launched_in_parts() -> None:
    x = jax.ShapeDtypeStruct((70_000, 129), jnp.uint8)
    one = functools.partial(pack, bits=4, implementation="mosaic_gpu")
    text = lowered(jax.vmap(one), x, platform="cuda")
    assert text.count(f"@{CALLS['cuda']}") == 2
    assert "tensor<65535x" in text and "tensor<4465x" in text
