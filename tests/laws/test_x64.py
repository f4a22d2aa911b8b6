"""With `jax_enable_x64`, and under strict promotion, every method updates as without it.

The leaves are large, since sums and positions are found in another way there.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import CASES, Case
from tests.workers import aggregate

SIZE = 1 << 17


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_x64_mode_changes_no_update(case: Case) -> None:
    """A leaf in float32, and one that is then in float64."""
    x, y = np.random.default_rng(0).standard_normal((2, 4, SIZE)).astype(np.float32)
    narrow = aggregate(case.make(), [jnp.asarray(x), jnp.asarray(y)], "vmap")
    with jax.enable_x64(True):
        given = [jnp.asarray(x), jnp.asarray(y, jnp.float64)]
        wide = aggregate(case.make(), given, "vmap")
    for found, expected in zip(wide, narrow, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
