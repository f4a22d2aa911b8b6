"""The union of bitmaps: against NumPy, in every mode, of any shape and width."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcomm
from tests.aggregation.runs import over, refuse
from tests.slow import slow
from tests.workers import mesh_of

SHAPES = {
    "uint8": (3, 5),
    "uint16": (),
    "uint32": (17,),
    "few": (2, 1),
    "empty": (2, 0),
    "full": (4,),
}


def bitmaps(workers: int) -> dict[str, np.ndarray]:
    """Each bit is set on one worker in five, so that unions are neither empty nor full."""
    rng = np.random.default_rng(workers)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        dtype = np.dtype(name if name.startswith("uint") else "uint32")
        bits = rng.random((workers, *shape, 8 * dtype.itemsize)) < 0.2
        weights = 2 ** np.arange(8 * dtype.itemsize, dtype=np.uint64)
        return (bits * weights).sum(-1, dtype=np.uint64).astype(dtype)

    given = {name: draw(name, shape) for name, shape in SHAPES.items()}
    # All bits on all workers: a sum would carry out of every word.
    return given | {"full": np.full((workers, 4), 2**32 - 1, np.uint32)}


def union(tree: Any) -> Any:
    return jax.tree.map(jaxcomm.or_reduce, tree)


def on_mesh(workers: int) -> Any:
    """The specs prove the results equal on all workers."""
    return over(mesh_of(workers), "data", union)


def unchecked(workers: int) -> Any:
    """Types do not prove it: every worker's replica, [workers, ...]."""
    replica = lambda tree: jax.tree.map(lambda x: x[None], union(tree))  # noqa: E731
    options = {"check_vma": False, "out_specs": P("data")}
    return over(mesh_of(workers), "data", replica, **options)


def under_vmap(workers: int) -> Any:
    return jax.jit(jax.vmap(union, axis_name="data"))


@pytest.mark.parametrize(
    ("build", "workers"),
    [
        (on_mesh, 5),
        (under_vmap, 3),
        (unchecked, 3),
        *(slow(on_mesh, n) for n in (1, 2, 3, 8)),
        *(slow(under_vmap, n) for n in (1, 16)),
    ],
)
def test_against_numpy(build: Any, workers: int) -> None:
    given = bitmaps(workers)
    results = build(workers)(given)
    for name, words in given.items():
        expected, found = np.bitwise_or.reduce(words, axis=0), np.asarray(results[name])
        np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape), name)
        assert found.dtype == words.dtype


def test_over_two_axes() -> None:
    given, axes = bitmaps(8)["uint32"], ("dcn", "ici")
    mesh = jax.make_mesh((2, 4), axes, axis_types=(AxisType.Auto,) * 2)
    reduce = lambda x: jaxcomm.or_reduce(x, axis_name=axes)  # noqa: E731
    nested = jax.vmap(jax.vmap(reduce, axis_name="ici"), axis_name="dcn")
    expected = np.bitwise_or.reduce(given)
    np.testing.assert_array_equal(over(mesh, axes, reduce)(given), expected)
    simulated = jax.jit(nested)(given.reshape(2, 4, 17))
    np.testing.assert_array_equal(simulated, np.broadcast_to(expected, (2, 4, 17)))


@pytest.mark.parametrize(
    ("workers", "shape", "dtype", "sent"),
    [
        (1, (17,), "uint32", 0),
        (2, (17,), "uint32", 2 * 1 * 9 * 4),  # Rows of 9 words, the last one padded by one.
        (5, (), "uint16", 2 * 4 * 1 * 2),  # One word makes four rows of padding.
        (8, (1024,), "uint32", 2 * 7 * 128 * 4),
    ],
)
def test_bytes(workers: int, shape: tuple[int, ...], dtype: str, sent: int) -> None:
    counted = jaxcomm.wire.account(on_mesh(workers), jnp.zeros((workers, *shape), dtype))
    assert counted.bytes_per_worker == sent
    assert {str(c.dtype) for c in counted.collectives} <= {dtype}


@pytest.mark.parametrize("build", [on_mesh, under_vmap])
@pytest.mark.parametrize("dtype", ["bool", "int32", "float32"])
def test_unpacked_bits_are_refused(dtype: str, build: Any) -> None:
    message = rf"unsigned integers, as of .*packbits`, got {dtype}"
    refuse(message, lambda: build(2)(jnp.ones((2, 3), dtype)))
