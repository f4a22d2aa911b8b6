"""Dithering against the paper's examples, exact moments, and a NumPy twin, bit for bit."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import jaxcomm
from jaxcomm.compression.quantizers._dither import NORMS, variance_constant
from tests.slow import slow
from tests.workers import draws, flat

ALPHA = 1e-6


def test_the_worked_example_of_the_paper() -> None:
    # n=2, d=1, s=2, x=(3, -1): norm 3, so worker 2 sends -0.5 with probability 2/3, else 0.
    sample = draws(jaxcomm.global_qsgd(levels=2), jnp.array([[3.0], [-1.0]]), 3000)[:, 0]
    assert set(np.unique(sample)) == {0.75, 1.5}
    heads = int(np.sum(sample == 0.75))
    assert scipy.stats.binomtest(heads, 3000, 2 / 3).pvalue > ALPHA


@pytest.mark.parametrize(("norm", "levels"), [("l2", 15), slow("max", 1), slow("l2", 1)])
def test_the_variance_has_its_exact_value(norm: str, levels: int) -> None:
    """E|G - mean|^2 = step^2 / n^2 * sum of p (1 - p), p the fractions between two levels."""
    given = np.random.default_rng(0).normal(size=(6, 40)).astype(np.float32)
    tx = jaxcomm.global_qsgd(levels=levels, norm=norm)
    errors = np.sum((draws(tx, jnp.asarray(given), 3000) - given.mean(axis=0)) ** 2, axis=1)
    step = {"max": np.abs(given).max(), "l2": np.linalg.norm(given)}[norm] / levels
    fractions = given.astype(np.float64) / step % 1
    exact = (step / 6) ** 2 * np.sum(fractions * (1 - fractions))
    deviation = errors.std(ddof=1) / 3000**0.5
    assert abs(errors.mean() - exact) <= scipy.stats.norm.isf(ALPHA / 2) * deviation


@pytest.mark.parametrize("size", [1, slow(2), 1000])
def test_l2_norms_at_every_scale(size: int) -> None:
    measure = jax.jit(jax.vmap(NORMS["l2"].measure))
    for scale in (1e-30, 1e-10, 1.0, 1e15, 1e30):
        x = (scale * np.random.default_rng(5).normal(size=(3, size))).astype(np.float32)
        x[1] *= np.float32(1e-3)
        total = jax.tree.map(lambda part: jnp.sum(part, axis=0), measure(jnp.asarray(x)))
        norm = np.linalg.norm(x.astype(np.float64))
        np.testing.assert_allclose(NORMS["l2"].value(total), norm, rtol=2e-6)


def test_few_levels_warn_with_levels_workers_and_variance() -> None:
    given = jnp.ones((64, 100))
    message = r"`bits`=8 leaves 1 levels .* 64 workers: for 100 .* 1\.25"
    with pytest.warns(UserWarning, match=message):
        draws(jaxcomm.global_qsgd(bits=8), given, 1)
    assert math.isclose(variance_constant(100, 1, 64), 1.25)
    draws(jaxcomm.global_qsgd(levels=1), given, 1)  # Asked for, so no warning.
    with pytest.raises(ValueError, match=r"`bits` must be in \[2, 16\], or 32, got 17"):
        jaxcomm.global_qsgd(bits=17)


def test_gathered_norms_are_each_workers_own() -> None:
    # Own norms make one-hot updates exact, however unlike their magnitudes.
    given = jnp.diag(jnp.array([1e-6, 1.0, 1e6]))
    result = draws(jaxcomm.qsgd(levels=1), given, 1)[0]
    np.testing.assert_allclose(result, flat(given).mean(axis=0), rtol=1e-6)
