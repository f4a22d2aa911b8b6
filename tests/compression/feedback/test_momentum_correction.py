"""Momentum correction against its recursion in NumPy, and its limits."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.compression.feedback import error_feedback, momentum_correction
from jaxcomm.compression.sparsifiers import top_k
from tests.compression.feedback.test_error_feedback import run

STEPS, D = 25, 12


def draw() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(STEPS, D))


@pytest.mark.quick(1)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("masking", [False, True])
def test_the_recursion(nesterov: bool, masking: bool) -> None:
    given = draw()
    codec = momentum_correction(
        error_feedback(top_k(k=3)), 0.7, nesterov=nesterov, momentum_masking=masking
    )
    sent, kept = run(codec, jnp.asarray(given, jnp.float32))
    u, v = np.zeros(D), np.zeros(D)
    for g, message, velocity in zip(given, sent, kept, strict=True):
        if nesterov:
            u = 0.7 * (u + g)
            v = v + u + g
        else:
            u = 0.7 * u + g
            v = v + u
        mask = np.zeros(D, bool)
        mask[np.argsort(-np.abs(v))[:3]] = True
        np.testing.assert_allclose(message, np.where(mask, v, 0), rtol=0, atol=1e-5)
        v = np.where(mask, 0, v)
        u = np.where(mask & masking, 0, u)
        np.testing.assert_allclose(velocity, u, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_without_momentum_it_is_the_codec() -> None:
    given = jnp.asarray(draw(), jnp.float32)
    bare, _ = run(error_feedback(top_k(k=3)), given)
    for nesterov in (False, True):
        codec = momentum_correction(error_feedback(top_k(k=3)), 0.0, nesterov=nesterov)
        np.testing.assert_array_equal(run(codec, given)[0], bare)


def test_where_all_is_sent() -> None:
    given = jnp.asarray(draw(), jnp.float32)
    everything = error_feedback(top_k(ratio=1.0))
    ages = np.arange(STEPS)[:, None] - np.arange(STEPS)[None]
    weights = np.where(ages >= 0, 0.7 ** np.maximum(ages, 0), 0)
    # Without masking, momentum SGD as it is; with it, nothing is left to gather momentum.
    sent, _ = run(momentum_correction(everything, 0.7, momentum_masking=False), given)
    np.testing.assert_allclose(sent, weights @ draw(), rtol=0, atol=1e-5)
    sent, kept = run(momentum_correction(everything, 0.7), given)
    np.testing.assert_array_equal(sent, given)
    np.testing.assert_array_equal(kept, 0)


@pytest.mark.parametrize("momentum", [-0.1, 1.0, None])
def test_impossible_momentum(momentum: float) -> None:
    with pytest.raises(ValueError, match=r"`momentum` must be a Python float in \[0, 1\), got"):
        momentum_correction(top_k(k=1), momentum)
