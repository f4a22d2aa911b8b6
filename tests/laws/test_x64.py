"""With `jax_enable_x64`, and under strict promotion, every method updates as without it.

The leaves are large, since sums and positions are found in another way there.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import CASES, Case, rows
from tests.workers import aggregate

SIZE = 1 << 17
QUICK = {"global_qsgd"}


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", rows(CASES, QUICK), ids=repr)
def test_wide_numbers_change_no_update(case: Case) -> None:
    x = np.random.default_rng(0).standard_normal((4, SIZE)).astype(np.float32)
    narrow = aggregate(case.make(), jnp.asarray(x), "vmap")
    with jax.enable_x64(True):
        for dtype in (jnp.float32, jnp.float64):
            wide = aggregate(case.make(), jnp.asarray(x, dtype), "vmap")
            np.testing.assert_allclose(wide, narrow, rtol=1e-5, atol=1e-6)
