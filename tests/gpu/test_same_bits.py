"""What a GPU computes, by XLA and by the kernels, is what the reference computes on the CPU."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels import _dispatch
from pallas_kernels._dispatch import Implementation
from pallas_kernels.arg_specs import ROWS, Row

REHEARSE = bool(os.environ.get("JAXCOMM_REHEARSE"))  # On a CPU, in the interpreter.
SIZES = [129, 1000] if REHEARSE else [1, 127, 129, 1000, 65_537, 2**20, 3_000_001]
LARGE = 2**11 if REHEARSE else 2**20
AWKWARD = [np.nan, np.inf, -np.inf, -0.0, 1e-40, -1e-45, 2.0**-126, 3e38, -3e38]

EVERY = [
    (row, implementation)
    for row in ROWS
    for implementation in ("reference", *row.kernels)
    if implementation != "mosaic_tpu"
]
FIRST_OF_EACH_OP = list({(row.op, name): (row, name) for row, name in reversed(EVERY)}.values())


def name(value: Any) -> str | None:
    return value.label if isinstance(value, Row) else None


def make_awkward(x: jax.Array) -> jax.Array:
    """`x`, a few elements of which, if it is an array of floats, are the values that go wrong."""
    if x.ndim == 0 or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    values = np.array(x)
    places = np.linspace(0, x.size - 1, len(AWKWARD)).astype(int) if x.size > 100 else []
    values.reshape(-1)[places] = np.array(AWKWARD[: len(places)]).astype(x.dtype)
    return jnp.asarray(values)


def expected(row: Row, size: int, cpu: jax.Device) -> tuple[tuple[jax.Array, ...], Any]:
    """Arguments, and what the reference on the CPU makes of them."""
    with jax.default_device(cpu):
        arguments = tuple(map(make_awkward, row.arguments(size)))
        return arguments, jax.jit(row.function(size, "reference"))(*arguments)


def require_hopper(implementation: Implementation, gpu: jax.Device) -> None:
    platform = "cpu" if REHEARSE else "cuda"
    reason = _dispatch.reason_against(implementation, _dispatch.Device(platform, gpu.device_kind))
    if reason:
        pytest.skip(f"no GPU of that kind: {reason}")


def check(row: Row, actual: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if row.exact or not jnp.issubdtype(b.dtype, jnp.floating):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        else:
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("row", "implementation"), EVERY, ids=name)
def test_every_size(
    row: Row, implementation: Implementation, size: int, cpu: jax.Device, gpu: jax.Device
) -> None:
    require_hopper(implementation, gpu)
    arguments, wanted = expected(row, size, cpu)
    actual = jax.jit(row.function(size, implementation))(*jax.device_put(arguments, gpu))
    check(row, actual, wanted)


@pytest.mark.parametrize(("row", "implementation"), FIRST_OF_EACH_OP, ids=name)
def test_inside_a_mapped_scan(
    row: Row, implementation: Implementation, cpu: jax.Device, gpu: jax.Device
) -> None:
    """Two batches in a scan, each of two arrays under vmap, in a shard_map that checks types."""
    require_hopper(implementation, gpu)
    size = 5000
    arguments, wanted = expected(row, size, cpu)
    stacked = jax.device_put(
        jax.tree.map(lambda x: jnp.broadcast_to(x, (2, 2, *x.shape)), arguments), gpu
    )

    @jax.shard_map(
        mesh=Mesh(np.array([gpu]), ("data",)),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
    )
    def mapped(stacked: Any) -> Any:
        f = jax.vmap(row.function(size, implementation))
        return lax.scan(lambda carry, batch: (carry, f(*batch)), 0, stacked)[1]

    results = jax.jit(mapped)(stacked)
    for i in range(2):
        for j in range(2):
            check(row, jax.tree.map(lambda x, i=i, j=j: x[i, j], results), wanted)


def test_the_choice_for_this_device_is_right_too(cpu: jax.Device, gpu: jax.Device) -> None:
    size = LARGE
    for row in ROWS:
        arguments, wanted = expected(row, size, cpu)
        actual = jax.jit(row.function(size, None))(*jax.device_put(arguments, gpu))
        check(row, actual, wanted)


def test_buffers_can_be_given_away(gpu: jax.Device) -> None:
    row = next(row for row in ROWS if row.label == "dequantize, 8 bits, accumulate")
    size = LARGE
    codes, scale, total = jax.device_put(row.arguments(size), gpu)
    wanted = jax.jit(row.function(size, None))(codes, scale, total)
    given = jax.jit(row.function(size, None), donate_argnums=2)(codes, scale, total)
    np.testing.assert_array_equal(given, wanted)
    assert total.is_deleted()
