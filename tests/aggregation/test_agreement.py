"""Statistics of several units that share them."""

import jax.numpy as jnp
import numpy as np

from jaxcomm.aggregation._exchange import over_units


def test_statistics_of_a_group_are_combined_entry_by_entry() -> None:
    vectors = [jnp.array([1.0, 5.0, 2.0]), jnp.array([4.0, 3.0, 9.0]), jnp.array([7.0, 7.0, 7.0])]
    given = [{"largest": vector, "total": vector} for vector in vectors]
    found = over_units({"largest": "max", "total": "sum"}, given, [0, 0, 1])
    np.testing.assert_array_equal(found[0]["largest"], [4, 5, 9])
    np.testing.assert_array_equal(found[0]["total"], [5, 8, 11])
    np.testing.assert_array_equal(found[1]["total"], vectors[2])
