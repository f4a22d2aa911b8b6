"""At most the threshold is sent, and what is left stays below it while updates do."""

import numpy as np
import pytest

from jaxcomm import Claims
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import fixed_threshold
from tests.codecs import payload_of, run, sent

CODEC = fixed_threshold(0.5)


def test_three_values() -> None:
    x = np.array([[0.5, 0.49, -0.5], [-7.0, 0.0, -0.2]])
    np.testing.assert_array_equal(sent(CODEC, x), [[0.5, 0, -0.5], [-0.5, 0, 0]])
    # Six coordinates, of sixteen that a word holds.
    assert payload_of(CODEC, (2, 3)).codes.shape == (1,)


def test_residuals_stay_below_the_threshold() -> None:
    rng = np.random.default_rng(0)
    within = (rng.uniform(-0.5, 0.5, size=(100, 50)) + 0.3).clip(-0.5, 0.5)
    _, left, _ = run(error_feedback(CODEC), within)
    assert 0.25 < np.abs(left).max() <= 0.5 + 1e-6
    # Of larger updates it grows.
    _, left, _ = run(error_feedback(CODEC), np.full((100, 50), 0.75))
    np.testing.assert_allclose(left[-1], 0.25 * 100, rtol=1e-5)


def test_it_claims_no_relative_bound() -> None:
    assert CODEC.claims == Claims(variance=None, contraction=None, bounded=True)
    with pytest.raises(ValueError, match="`threshold`"):
        fixed_threshold(np.nan)
