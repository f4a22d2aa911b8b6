"""No sum overflows: if all workers hold the extreme value, so does the mean."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import MEANS, Case, rows_by_workers
from tests.workers import aggregate, aggregator, initial

ROUNDED_UP = {"natural_compression"}  # To a power of two, which of the largest floats is infinite.


def check_overflow(case: Case, workers: int) -> None:
    # Several steps' coins: the released int8 hook of Global-QSGD wraps in one draw of three.
    extreme = jnp.asarray(np.tile(np.float32([1, -1, 1, 0.25, -1]), (workers, 1)))
    tx = case.make()
    run, state = aggregator(tx, workers, "vmap"), initial(tx, extreme, "vmap")
    for _ in range(10):
        results, state = run(extreme, state, np.ones(workers, np.float32))
        bound = case.resolution(*extreme.shape) + 1e-5
        np.testing.assert_allclose(np.asarray(results), np.asarray(extreme), rtol=0, atol=bound)


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("case", "workers"), rows_by_workers(MEANS, [3, 64], [], (1, 2, 4, 5, 8, 16)), ids=repr
)
@pytest.mark.filterwarnings("ignore:`bits`=8 leaves:UserWarning")
def test_overflow(case: Case, workers: int) -> None:
    check_overflow(case, workers)


@pytest.mark.quick(2)
@pytest.mark.parametrize(("case", "workers"), rows_by_workers(MEANS, [3, 8], []), ids=repr)
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
