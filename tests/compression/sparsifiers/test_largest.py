"""Where the largest are: a threshold finds what a sort does, ties and all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.compression.sparsifiers._largest import by_sort, by_threshold, largest

SIZE = 1003
NORMAL = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
INPUTS = {
    "normal": np.abs(NORMAL),
    "ties": np.abs(np.round(2 * NORMAL)),
    "zeros": np.zeros(SIZE, np.float32),
    "few": np.where(np.arange(SIZE) % 100 == 7, np.abs(NORMAL), 0),
    "huge": np.where(np.arange(SIZE) % 2, np.float32(np.inf), np.float32(3e38)),
    "subnormal": np.abs(NORMAL) * np.float32(1e-39),
    "unwanted": np.where(np.arange(SIZE) % 3, np.abs(np.round(NORMAL)), np.float32(-1)),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("k", [1, 31, 500, SIZE])
def test_a_threshold_finds_what_a_sort_does(name: str, k: int) -> None:
    x = jnp.asarray(INPUTS[name], jnp.float32)
    np.testing.assert_array_equal(jax.jit(by_threshold, static_argnums=1)(x, k), by_sort(x, k))


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64])
def test_any_size(size: int) -> None:
    x = jnp.asarray(INPUTS["ties"][:size])
    for k in {1, size // 2 or 1, size}:
        np.testing.assert_array_equal(by_threshold(x, k), by_sort(x, k))


def test_rows_of_their_own() -> None:
    x = jnp.asarray(INPUTS["ties"][:1000]).reshape(10, 100)
    each = jnp.stack([by_threshold(row, 7) for row in x])
    np.testing.assert_array_equal(largest(x, 7), each)
    np.testing.assert_array_equal(jax.vmap(lambda row: by_threshold(row, 7))(x), each)
