"""Ternary codes: the bound where it is attained, for one worker and several, and clipping."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm import Claims
from jaxcomm.compression.quantizers import ternary
from jaxcomm.testing._codec import decoded
from tests.codecs import context_of, payload_of, sent
from tests.slow import slow
from tests.workers import draws


@pytest.mark.parametrize(("workers", "size"), [(1, 100), (4, 25)])
def test_the_bound_is_attained(workers: int, size: int) -> None:
    # (sqrt(100) - 1) / 2: with a shared scale, of the coordinates of all workers.
    assert ternary().claims.variance(size, workers) == pytest.approx(4.5)
    # One coordinate of 1 and all others of the value that makes the error largest.
    x = np.full((workers, size), 1 / ((workers * size) ** 0.5 + 1))
    x[0, 0] = 1
    errors = np.sum((decoded(ternary(), x, 4000, seed=3) - x) ** 2, axis=(1, 2))
    np.testing.assert_allclose(errors.mean() / np.sum(x**2), 4.5, rtol=0.03)


@pytest.mark.parametrize(("scale", "largest"), [("own", 2.5), ("shared", 4.0)])
def test_workers_share_a_scale_or_not(scale: str, largest: float) -> None:
    # The first worker's coordinates are 0 or its own scale, 1; or 0 or that of the second, 4.
    given = jnp.array([[1.0, 0.5], [4.0, -4.0]])
    results = draws(jaxcomm.terngrad(scale=scale, clip=None), given, 200)
    assert np.abs(results).max() == largest


@pytest.mark.parametrize("factor", [1e36, slow(1.0), slow(1e-33)])
def test_clipping_against_numpy(factor: float) -> None:
    x = np.random.default_rng(2).standard_t(2, size=500)
    x *= factor / np.abs(x).max()
    limit = 2.5 * np.sqrt(np.mean((x / factor) ** 2)) * factor
    assert np.sum(np.abs(x) > limit) > 3
    codec, given = ternary(clip=2.5), jnp.asarray(x, jnp.float32)
    np.testing.assert_allclose(context_of(codec, given).statistics.max_abs, limit, rtol=1e-5)
    codes, found = payload_of(codec, given).codes, sent(codec, given)
    assert codes.shape == (-(-500 // 16),) and codes.dtype == jnp.uint32
    beyond = np.abs(x) > limit
    np.testing.assert_allclose(found[beyond], limit * np.sign(x[beyond]), rtol=1e-5)
    assert np.all((found == 0) | (np.sign(found) == np.sign(x)))
    assert codec.claims == Claims()


@pytest.mark.parametrize("x", [np.full(30, -0.3), slow(np.array(7.0)), slow(np.zeros(0))])
def test_equal_coordinates_are_not_clipped(x: np.ndarray) -> None:
    np.testing.assert_allclose(sent(ternary(clip=2.5), x), x, rtol=1e-6)
