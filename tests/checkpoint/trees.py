"""Compares trees with keys."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def words(tree: Any) -> Any:
    """Keys as integers."""
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
        tree,
    )


def assert_equal(tree: Any, other: Any) -> None:
    """Raises unless both are equal bit for bit."""
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for x, y in zip(*(jax.tree.leaves(words(t)) for t in (tree, other)), strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.dtype == y.dtype
