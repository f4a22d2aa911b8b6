"""Rows of the table of workloads: awkward arguments, comparison, and kernels in an interpreter."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels import _dispatch
from pallas_kernels._gpu import gpu_interpret_params
from pallas_kernels.arg_specs import ROWS, Row
from tests.pallas_kernels.lowering import INTERPRET_GPU, INTERPRET_TPU

PLATFORMS = _dispatch.PLATFORMS
AWKWARD = [np.nan, np.inf, -np.inf, -0.0, 1e-40, -1e-45, 2.0**-126, 3e38, -3e38]
EVERY = [(row, name) for row in ROWS for name in ("reference", *row.kernels)]
FIRST_OF_EACH_OP = [*{(row.op, name): (row, name) for row, name in reversed(EVERY)}.values()]


def label(value: Any) -> str | None:
    return value.label if isinstance(value, Row) else None


def make_awkward(x: jax.Array) -> jax.Array:
    """`x`, a few elements of which, if it is an array of floats, are the values that go wrong."""
    if x.size <= 100 or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    values = np.array(x)
    places = np.linspace(0, x.size - 1, len(AWKWARD)).astype(int)
    values.reshape(-1)[places] = np.array(AWKWARD).astype(x.dtype)
    return jnp.asarray(values)


def check(row: Row, actual: Any, wanted: Any) -> None:
    """Raises unless the results are as equal as the row says."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if row.exact or not jnp.issubdtype(b.dtype, jnp.floating):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        else:
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def in_a_mapped_scan(f: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """Batches in a scan, each of several arrays under vmap, in a shard_map that checks types."""

    @jax.shard_map(mesh=mesh, in_specs=P(mesh.axis_names[0]), out_specs=P(mesh.axis_names[0]))
    def mapped(stacked: Any) -> Any:
        return lax.map(lambda batches: lax.map(lambda batch: jax.vmap(f)(*batch), batches), stacked)

    return mapped


def check_in_a_mapped_scan(row: Row, name: Any, size: int, device: Any) -> None:
    """Two batches of two arrays, of which each has arguments of its own."""

    def varied(x: jax.Array, number: int) -> jax.Array:
        return jnp.roll(x, number) if x.ndim else x * (1 + number)

    with jax.default_device(jax.devices("cpu")[0]):
        given = row.arguments(size)
        examples = [[varied(x, number) for x in given] for number in range(4)]
        wanted = [*itertools.starmap(jax.jit(row.function(size, "reference")), examples)]
        stacked = [jnp.stack(x).reshape(1, 2, 2, *x[0].shape) for x in zip(*examples, strict=True)]
    mesh = Mesh(np.array([device]), ("data",))
    f = jax.jit(in_a_mapped_scan(row.function(size, name), mesh))
    results = f(jax.device_put(stacked, device))
    for number, (i, j) in enumerate(np.ndindex(2, 2)):
        check(row, jax.tree.map(lambda x, i=i, j=j: x[0, i, j], results), wanted[number])


@contextlib.contextmanager
def interpreted(config: Any = None, in_batches: bool = False) -> Iterator[None]:
    """Here ops run the kernels that are named in an interpreter that looks for races."""
    load_kernel = _dispatch.load

    def load(folder: str, name: str, function: str) -> Any:
        kernel = load_kernel(folder, name, function)
        interpret = INTERPRET_TPU if name == "mosaic_tpu" else INTERPRET_GPU
        if (folder, name) == ("block_float", "mosaic_gpu"):
            interpret = gpu_interpret_params()  # The last block writes some numbers again.
        given = {} if config is None else {"config": config}
        return functools.partial(kernel, **given, interpret=interpret)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(_dispatch, "load", load)
        monkeypatch.setattr(_dispatch, "reason_against", lambda *_: None)
        if in_batches:  # The interpreter does not know the semantics of the axis that vmap adds.
            monkeypatch.setattr(pltpu, "CompilerParams", lambda **_: None)
        yield
