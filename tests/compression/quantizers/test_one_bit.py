"""Two means per column, which keep its sum; the residual is orthogonal."""

import numpy as np
import pytest

from jaxcomm.compression.quantizers import one_bit
from tests import codecs
from tests.slow import slow


def sent(x: np.ndarray) -> np.ndarray:
    return codecs.sent(one_bit(), x)


@pytest.mark.parametrize("shape", [slow((50,)), (12, 5), slow((3, 4, 6))])
def test_columns_keep_only_their_sum(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_t(3, size=shape)
    result = sent(x)
    columns = (lambda a: a.reshape(-1, shape[-1])) if len(shape) > 1 else (lambda a: a[:, None])
    x, result = columns(x), columns(result)
    for column, got in zip(x.T, result.T, strict=True):
        above, below = column[column >= 0].mean(), column[column < 0].mean()
        np.testing.assert_allclose(got, np.where(column >= 0, above, below), rtol=1e-5)
        np.testing.assert_allclose(got.sum(), column.sum(), atol=1e-4)
        assert abs(np.sum((column - got) * got)) < 1e-4


def test_columns_of_one_sign_zeros_and_mixed_magnitudes() -> None:
    x = np.array([[1e-37, 3e38, 2.0, 0.0, -1.0], [1e-37, 3e38, 4.0, 0.0, -3.0]])
    expected = np.array([[1e-37, 3e38, 3.0, 0.0, -2.0]] * 2)
    np.testing.assert_allclose(sent(x), expected, rtol=1e-6)


@pytest.mark.parametrize("shape", [(2, 0), slow((0,)), slow(()), slow((1, 1))])
def test_edges_of_shape(shape: tuple[int, ...]) -> None:
    np.testing.assert_array_equal(sent(np.full(shape, -2.0)), np.full(shape, -2.0))
