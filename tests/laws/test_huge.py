"""Gradients near the largest float: the update scales with them, or is not finite, but never 0."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import CASES, Case
from tests.workers import aggregate

HUGE = 2.0**127
FIXED = {"fixed_threshold", "fixed_threshold_summed"}  # Levels that do not scale with the update.
# Results that lose the magnitude, or clip the norm.
NO_MAGNITUDE = {"majority_vote", "sign_sgd", "signum", "local_clip", "deep_gradient_compression"}


@pytest.mark.parametrize("case", [c for c in CASES if c.name not in FIXED], ids=repr)
def test_huge_updates_are_correct_or_nonfinite(case: Case) -> None:
    rng = np.random.default_rng(0)
    signs = rng.choice([-1.0, 1.0], size=(12, 8))
    given = (rng.uniform(0.5, 1.9, size=(2, 12, 8)) * signs).astype(np.float32)
    usual, huge = (
        aggregate(case.make(), {"w": jnp.asarray(x)})["w"] for x in (given, given * HUGE)
    )
    if np.isfinite(huge).all():
        scale = 1.0 if case.name in NO_MAGNITUDE else HUGE
        np.testing.assert_allclose(huge / scale, usual, rtol=1e-5, atol=1e-5)
