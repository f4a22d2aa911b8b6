"""The networks: convolutions as matrix products."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import linen

from experiments.tasks.models import Conv
from tests.slow import slow


@pytest.mark.parametrize(
    ("shape", "size", "options", "flax"),
    [
        slow((2, 5, 6, 3), (3, 3), {}, {}),
        ((2, 5, 4, 1), (2, 3), {"dilation": 2}, {"kernel_dilation": 2}),
        slow((3, 9, 4), (3,), {"dilation": 2, "is_causal": True},
             {"kernel_dilation": 2, "padding": "CAUSAL"}),
    ],
)  # fmt: skip
def test_a_convolution_is_that_of_flax(
    shape: tuple[int, ...], size: tuple[int, ...], options: dict[str, Any], flax: dict[str, Any]
) -> None:
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    both = Conv(7, size, **options), linen.Conv(7, size, **flax)
    params, expected = (each.init(jax.random.key(0), x) for each in both)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    params = jax.tree.map(lambda w: w + 0.1, params)
    values, gradients = zip(
        *(jax.vjp(lambda p, each=each: each.apply(p, x), params) for each in both), strict=True
    )
    np.testing.assert_allclose(*values, atol=1e-5)
    (found,), (expected,) = (pull(2 * value) for pull, value in zip(gradients, values, strict=True))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), found, expected
    )
