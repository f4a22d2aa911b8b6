"""The union of bitmaps: against NumPy, in every mode, of any shape and width."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jaxcomm
from tests.slow import slow
from tests.workers import MODE_ROWS, Mode, mesh_of

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


def on_mesh(workers: int, check: bool = True) -> Any:
    def local(tree: Any) -> Any:
        return union(jax.tree.map(lambda x: x[0], tree))

    return jax.jit(
        jax.shard_map(  # With `check_vma=True`, the specs prove the results equal on all workers.
            local,
            mesh=mesh_of(workers),
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec() if check else PartitionSpec("data"),
            check_vma=check,
        )
    )


def assert_union(results: Any, given: Any) -> None:
    for name, words in given.items():
        expected = np.bitwise_or.reduce(np.asarray(words), axis=0)
        np.testing.assert_array_equal(results[name], expected, err_msg=name)
        assert results[name].dtype == words.dtype


@pytest.mark.parametrize("workers", [1, 5, slow(2), slow(3), slow(8)])
def test_against_numpy_on_a_mesh(workers: int) -> None:
    given = bitmaps(workers)
    assert_union(on_mesh(workers)(given), given)


@pytest.mark.parametrize("workers", [1, 3, 16])
def test_against_numpy_simulated(workers: int) -> None:
    given = bitmaps(workers)
    results = jax.tree.map(np.asarray, jax.jit(jax.vmap(union, axis_name="data"))(given))
    for worker in range(workers):
        assert_union(jax.tree.map(lambda x, i=worker: x[i], results), given)


def test_replicas_are_equal_where_types_do_not_say_so() -> None:
    given = bitmaps(3)["uint32"]
    results = on_mesh(3, check=False)({"uint32": given})["uint32"].reshape(3, -1)
    np.testing.assert_array_equal(results, np.tile(np.bitwise_or.reduce(given), (3, 1)))


def test_over_two_axes() -> None:
    given, axes = bitmaps(8)["uint32"], ("dcn", "ici")
    expected = np.bitwise_or.reduce(np.asarray(given))
    mesh = jax.make_mesh((2, 4), axes, axis_types=(AxisType.Auto,) * 2)
    both = jax.shard_map(
        lambda x: jaxcomm.or_reduce(x[0], axis_name=axes),
        mesh=mesh,
        in_specs=PartitionSpec(axes),
        out_specs=PartitionSpec(),
    )
    np.testing.assert_array_equal(jax.jit(both)(given), expected)
    inner = jax.vmap(lambda x: jaxcomm.or_reduce(x, axis_name=axes), axis_name="ici")
    simulated = jax.jit(jax.vmap(inner, axis_name="dcn"))(given.reshape(2, 4, 17))
    np.testing.assert_array_equal(simulated, np.broadcast_to(expected, (2, 4, 17)))


@pytest.mark.parametrize(
    ("workers", "shape", "dtype", "sent"),
    [
        (1, (17,), "uint32", 0),
        (2, (17,), "uint32", 2 * 1 * 9 * 4),  # Rows of 9 words, the last one padded by one.
        (3, (3, 5), "uint8", 2 * 2 * 5),
        (5, (), "uint16", 2 * 4 * 1 * 2),  # One word makes four rows of padding.
        (8, (1024,), "uint32", 2 * 7 * 128 * 4),
        (8, (2, 0), "uint32", 0),
    ],
)
def test_bytes(workers: int, shape: tuple[int, ...], dtype: str, sent: int) -> None:
    given = {"map": jnp.zeros((workers, *shape), dtype)}
    counted = jaxcomm.wire.account(on_mesh(workers), given)
    assert counted.bytes_per_worker == sent
    assert {str(c.dtype) for c in counted.collectives} <= {dtype}


def test_masks_are_packed_as_the_error_says() -> None:
    masks = np.random.default_rng(0).random((3, 4, 5)) < 0.3

    def joined(mask: jax.Array) -> jax.Array:
        words = jaxcomm.or_reduce(jnp.packbits(mask.ravel()))
        return jnp.unpackbits(words, count=mask.size).reshape(mask.shape)

    results = jax.vmap(joined, axis_name="data")(jnp.asarray(masks))
    np.testing.assert_array_equal(results[0], masks.any(axis=0))


@pytest.mark.parametrize("mode", MODE_ROWS)
def test_what_is_not_packed_is_an_error(mode: Mode) -> None:
    def run(x: jax.Array) -> jax.Array:
        if mode == "vmap":
            return jax.vmap(jaxcomm.or_reduce, axis_name="data")(x)
        return on_mesh(2, mode == "checked")(x)

    for dtype in ("bool", "int32", "float32"):
        with pytest.raises(ValueError, match=rf"unsigned integers, as of .*packbits`, got {dtype}"):
            run(jnp.ones((2, 3), dtype))


def test_outside_of_any_mesh_is_an_error() -> None:
    with pytest.raises(ValueError, match="`axis_name`='workers' is not bound here"):
        jaxcomm.or_reduce(jnp.zeros(3, jnp.uint32), axis_name="workers")
