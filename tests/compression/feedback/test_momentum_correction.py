"""Momentum correction against its recursion in NumPy, and its limits."""

import numpy as np
import pytest

from jaxcomm.compression.feedback import error_feedback, momentum_correction
from jaxcomm.compression.sparsifiers import top_k
from tests.codecs import run
from tests.slow import slow

STEPS, D = 25, 12


GIVEN = np.random.default_rng(0).normal(size=(STEPS, D)).astype(np.float32)


@pytest.mark.parametrize(
    ("nesterov", "masking"), [(True, True), slow(False, True), slow(True, False)]
)
def test_the_recursion(nesterov: bool, masking: bool) -> None:
    codec = momentum_correction(
        error_feedback(top_k(k=3)), 0.7, nesterov=nesterov, momentum_masking=masking
    )
    sent, kept, _ = run(codec, GIVEN)
    u, v = np.zeros(D), np.zeros(D)
    for g, message, velocity in zip(GIVEN, sent, kept, strict=True):
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
