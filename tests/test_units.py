"""Converts trees to units and back."""

import itertools

import chex
import jax.numpy as jnp
import pytest

from jaxcomm import _units

TREE = {
    "a": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
    "b": (jnp.float32(7), None, jnp.zeros((0, 4), jnp.float16)),
    "c": jnp.arange(10, dtype=jnp.float32),
}


@pytest.mark.parametrize("scope", ["leaf", "bucket", "tree"])
@pytest.mark.parametrize("layout", ["concatenated", "shared_statistics", "independent"])
def test_units_rebuild_the_tree(scope: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for large, capacity in itertools.product((1, 7, 2**16), (4, 28, 2**20)):
        monkeypatch.setattr(_units, "LARGE", large)
        units, _, join = _units.split(TREE, scope, capacity, layout=layout)
        assert all(unit.dtype == jnp.float32 for unit in units)
        chex.assert_trees_all_equal(join(units), TREE)
        chex.assert_trees_all_equal_shapes_and_dtypes(join(units), TREE)


def test_buckets_are_filled_in_order_without_splitting_leaves() -> None:
    sizes = [[u.size for u in _units.split(TREE, "bucket", c)[0]] for c in (4, 28, 2**20)]
    assert sizes == [[6, 1, 10], [7, 10], [17]]
    units, *_ = _units.split(TREE, "leaf", 4)
    assert [u.shape for u in units] == [(2, 3), (), (0, 4), (10,)]


def test_an_empty_tree_has_no_units() -> None:
    units, _, join = _units.split({"a": None}, "bucket", 4)
    assert units == [] and join([]) == {"a": None}
