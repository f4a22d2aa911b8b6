"""If theory gives the error exactly, it has this value and is not merely within a bound."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxcomm.testing._law import inputs
from tests.cases import CASES, Case
from tests.laws.test_contraction import DRAWS, SIZE, compressed

MOMENTS = [c for c in CASES if c.moment]


def check_moment(case: Case, name: str) -> None:
    x = np.asarray(inputs(SIZE)[name][0], np.float32)
    decoded = compressed(case.compressor, jnp.asarray(x), DRAWS if case.random else 1)
    errors = np.sum((decoded - x.astype(np.float64)) ** 2, axis=1)
    expected = case.moment(x.astype(np.float64))
    slack = scipy.stats.norm.isf(5e-7) * errors.std() / len(errors) ** 0.5
    assert abs(errors.mean() - expected) <= slack + 1e-5 * expected + 1e-10 * np.sum(x**2)


@pytest.mark.parametrize("name", ["normal", "heavy_tailed", "one_hot", "constant", "zero"])
@pytest.mark.parametrize("case", MOMENTS, ids=repr)
def test_moment(case: Case, name: str) -> None:
    check_moment(case, name)
