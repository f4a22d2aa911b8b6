"""With `jax_enable_x64` and JAX's default promotion, methods update large leaves as without it.

Large leaves, since positions are found in another way there.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import CASES, Case
from tests.workers import aggregate

SIZE = 1 << 17
NAMES = ("sparse_global_qsgd", "adaptive_threshold", "top_k")


@pytest.mark.parametrize("case", [case for case in CASES if case.name in NAMES], ids=repr)
def test_wide_numbers_change_no_update(case: Case) -> None:
    x = np.random.default_rng(0).standard_normal((2, SIZE)).astype(np.float32)
    narrow = aggregate(case.make(), jnp.asarray(x), "vmap")
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        for dtype in (jnp.float32, jnp.float64):
            wide = aggregate(case.make(), jnp.asarray(x, dtype), "vmap")
            np.testing.assert_allclose(wide, narrow, rtol=1e-5, atol=1e-6)
