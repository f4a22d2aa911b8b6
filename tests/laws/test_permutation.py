"""Permuting the workers changes nothing."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import CASES, Case, rows
from tests.workers import ONE_LEAF, aggregate


def check_permutation(case: Case) -> None:
    # Coordinates at the norm or at zero are rounded exactly, so results can be compared.
    rng = np.random.default_rng(5)
    workers, coordinates = ONE_LEAF
    signs = np.zeros(ONE_LEAF)
    signs[np.arange(workers), rng.permutation(coordinates)[:workers]] = [1, -1, 1]
    if case.zeros_drawn:
        signs = rng.choice([-1.0, 1.0], ONE_LEAF)
    order = np.roll(np.arange(workers), 1)
    given = aggregate(case.make(), jnp.asarray(signs, jnp.float32))
    permuted = aggregate(case.make(), jnp.asarray(signs[order], jnp.float32))
    if not case.resolution:
        # Floats may round differently if they are added in another order.
        bound = 0 if case.integer_sum else 1e-6
        np.testing.assert_allclose(permuted, given, rtol=0, atol=bound)
        return
    exact = case.random and case.resolution(workers, 2) == case.resolution(workers, 1)
    bound = 0 if exact else 2 * case.resolution(*ONE_LEAF)
    np.testing.assert_allclose(permuted, given, rtol=0, atol=bound + 1e-6)
    np.testing.assert_allclose(given[0], signs.mean(axis=0), rtol=0, atol=bound + 1e-6)


@pytest.mark.parametrize("case", rows(CASES), ids=repr)
def test_permutation(case: Case) -> None:
    check_permutation(case)
