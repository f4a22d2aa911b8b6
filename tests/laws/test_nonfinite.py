"""NaN and infinity reach every worker."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.testing._steps import Setting, require_visible
from tests.cases import CASES, Case, rows
from tests.workers import MODE_ROWS, ONE_LEAF, Mode, gradients


def check_visible(case: Case, value: float, mode: Mode) -> None:
    setting = Setting(case.make(), 4, "data")
    require_visible(setting, gradients(4), {2: value}, shows=case.nonfinite, mode=mode)


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
    setting, opposite = Setting(case.make(), ONE_LEAF[0], "data"), {0: np.inf, 1: -np.inf}
    require_visible(setting, jnp.zeros(ONE_LEAF), opposite, shows=case.nonfinite)
