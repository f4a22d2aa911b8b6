"""The mean of updates near the largest float is right."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import MEANS, Case
from tests.workers import aggregate

ROUNDED_UP = {"natural_compression"}  # To a power of two, which of the largest floats is infinite.


@pytest.mark.parametrize("workers", [3, 8])
@pytest.mark.parametrize("case", MEANS, ids=repr)
def test_the_largest_float(case: Case, workers: int) -> None:
    # A wire of bfloat16 ends a little below float32, and a sum may be rounded above its largest.
    largest = 3e38
    # An l2 norm would itself overflow, and so would a value rounded up.
    grows = case.resolution(workers, 2) > case.resolution(workers, 1)
    if grows or case.resolution(workers, 1) > 1 or case.name in ROUNDED_UP:
        largest /= 4
    # With more coordinates, one that represents all dropped ones may exceed float32.
    given = jnp.broadcast_to(jnp.array([largest, -largest]), (workers, 2))
    bound = case.resolution(workers, 2) + 1e-6
    expected = np.asarray(given, np.float64)
    np.testing.assert_allclose(aggregate(case.make(), given), expected, rtol=bound)
