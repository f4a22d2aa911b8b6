"""NaN and infinity are seen by every worker."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import CASES, Case, rows
from tests.workers import MODE_ROWS, ONE_LEAF, Mode, aggregate, flat, gradients


def check_visible(case: Case, value: float, mode: Mode) -> None:
    updates = gradients(4)
    updates["kernel"] = updates["kernel"].at[2, 1, 1].set(value)
    results = flat(aggregate(case.make(), updates, mode))
    hit = 3 + 2 * 1 + 1
    assert not np.isfinite(results[:, hit]).any()


@pytest.mark.parametrize("mode", MODE_ROWS)
@pytest.mark.parametrize("case", rows(CASES), ids=repr)
def test_nan_is_visible(case: Case, mode: Mode) -> None:
    check_visible(case, np.nan, mode)


@pytest.mark.parametrize("value", [np.inf, -np.inf])
@pytest.mark.parametrize("case", rows(CASES), ids=repr)
def test_infinity_is_visible(case: Case, value: float) -> None:
    check_visible(case, value, "vmap")


@pytest.mark.parametrize("case", rows(CASES), ids=repr)
def test_opposite_infinities_do_not_cancel(case: Case) -> None:
    updates = np.zeros(ONE_LEAF, np.float32)
    updates[:2, 0] = np.inf, -np.inf
    assert np.isnan(aggregate(case.make(), jnp.asarray(updates))[:, 0]).all()
