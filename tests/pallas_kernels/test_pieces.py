"""Numbers divided among blocks of threads, in JAX's interpreter, which finds races."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _versions
from pallas_kernels._pieces import by_pieces
from tests.pallas_kernels.lowering import INTERPRET_GPU
from tests.slow import slow

BLOCK, UNIT = 256, 128


def add_one(first: Any, count: int, x_ref: Any, out_ref: Any) -> None:
    here = pl.ds(first, count)
    out_ref[here] = x_ref[here] + 1


def run(kernel: Callable[..., None], length: int, blocks: int) -> jax.Array:
    x = jnp.arange(length, dtype=jnp.int32)
    out_type = jax.ShapeDtypeStruct((length,), jnp.int32)
    call = _versions.gpu_kernel(
        kernel, out_type=out_type, grid={"block": blocks}, interpret=INTERPRET_GPU
    )
    out: jax.Array = jax.jit(call)(x)
    return out


@pytest.mark.parametrize("length", [577, slow(256), slow(257), slow(383), slow(384), slow(512)])
def test_every_number_is_written_without_a_race(length: int) -> None:
    out = run(by_pieces(length, BLOCK, UNIT, add_one), length, length // BLOCK)
    np.testing.assert_array_equal(out, np.arange(1, length + 1))


@pytest.mark.slow
def test_blocks_that_overlap_are_found() -> None:
    def kernel(*refs: Any) -> None:
        add_one(lax.min(lax.axis_index("block") * BLOCK, 577 - BLOCK), BLOCK, *refs)

    with pytest.raises(Exception, match=r"(?i)race"):
        run(kernel, 577, 3)
