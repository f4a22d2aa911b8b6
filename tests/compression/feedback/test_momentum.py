"""Momentum against its formula, where the codec shows its scale, as signs do not."""

import numpy as np

from jaxcomm.compression.feedback import momentum
from jaxcomm.compression.sparsifiers import top_k
from tests.codecs import run


def test_a_worker_sends_its_exponential_average() -> None:
    given = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
    sent, kept, _ = run(momentum(top_k(ratio=1.0), momentum=0.75), given)
    average = np.zeros(5)
    for x, found, memory in zip(given, sent, kept, strict=True):
        average = 0.75 * average + 0.25 * x
        np.testing.assert_allclose(found, average, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(memory, average, rtol=1e-5, atol=1e-7)
