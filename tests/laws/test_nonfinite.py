"""NaN and infinity are seen by every worker."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import CASES, Case, rows
from tests.workers import MODE_ROWS, Mode, aggregate, flat, gradients


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
    updates = jnp.zeros((4, 3)).at[0, 0].set(jnp.inf).at[1, 0].set(-jnp.inf)
    assert np.isnan(aggregate(case.make(), updates)[:, 0]).all()
