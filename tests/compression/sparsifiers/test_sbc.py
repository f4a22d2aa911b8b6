"""Binary: of one sign, as one mean; indices a little longer than Golomb's, and never longer."""

import numpy as np
import pytest

from jaxcomm.compression.sparsifiers import sbc
from tests.codecs import sent
from tests.slow import slow


@pytest.mark.parametrize(
    ("k", "x", "expected"),
    [
        # Means of the three largest: 4 above, 3 below; the largest of all is below.
        (3, [4.0, -7.0, 5.0, -1.0, 3.0, 0.5, -1.0, -0.2], [4.0, 0, 4.0, 0, 4.0, 0, 0, 0]),
        # Two of four places are taken; zeros, and coordinates of the other sign, are not sent.
        slow(4, [0.0, 5.0, 0.0, -1.0, 3.0, 0.0, -1.0], [0, 4, 0, 0, 4, 0, 0]),
        # The mean of what is there is larger above; over all places, below.
        (3, [1.0, -0.9, -0.9, -0.9], [0, -0.9, -0.9, -0.9]),
        slow(3, [-9e37, 3e37, -9e37, -9e37], [-9e37, 0, -9e37, -9e37]),
        slow(1, [], []),
    ],
)
def test_the_larger_mean_wins(k: int, x: list[float], expected: list[float]) -> None:
    for flip in (1, -1):
        found = sent(sbc(k=k), flip * np.array(x))
        np.testing.assert_allclose(found, flip * np.array(expected), rtol=1e-6)


@pytest.mark.slow
def test_the_bound_is_nearly_attained() -> None:
    """By as many equal coordinates of both signs as there can be."""
    equal = np.tile([1.0, -1.0], 50)
    left = np.sum((equal - sent(sbc(k=5), equal)) ** 2) / 100
    np.testing.assert_allclose(1 - left, 5 / 100, rtol=1e-6)
    np.testing.assert_allclose(sbc(k=5).claims.contraction(100, 1), 1 / (5 + 99 / 5))
    assert sbc(k=1).claims.contraction(2, 1) == 1 / 2
