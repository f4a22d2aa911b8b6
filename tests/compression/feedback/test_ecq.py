"""ECQ-SGD: damped compensation, from its recursion."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm import Memory
from jaxcomm.compression.feedback import ecq
from jaxcomm.compression.feedback._loop import FeedbackMemory
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import top_k
from tests.codecs import context_of, draws, run

GIVEN = np.random.default_rng(0).normal(size=(40, 24)).astype(np.float32)
QUANTIZER = dither(levels=4)


def test_errors_are_a_geometric_sum() -> None:
    sent, kept, _ = run(ecq(QUANTIZER, alpha=0.3, decay=0.8), GIVEN)
    ages = np.arange(40)[:, None] - np.arange(40)[None]
    weights = np.where(ages >= 0, 0.8 ** np.maximum(ages, 0), 0)
    np.testing.assert_allclose(kept, weights @ (GIVEN - sent), rtol=0, atol=1e-5)
    assert np.abs(kept).max() > 0.1


@pytest.mark.slow
def test_payloads_are_unbiased_for_the_compensated_update() -> None:
    codec, x, error = ecq(QUANTIZER), *map(jnp.asarray, GIVEN[:2])
    memory = Memory(FeedbackMemory(error, ()), ())
    aim = np.asarray(x) + 0.2 * np.asarray(error)
    target = codec.diagnose(context_of(codec, x, memory=memory), x, memory).target
    np.testing.assert_allclose(target, aim, rtol=1e-6)
    sample = draws(codec.replace(init=lambda x: memory), x, 4000)
    assert np.all(np.abs(sample.mean(axis=0) - aim) <= 6 * sample.std(axis=0) / 4000**0.5 + 1e-6)


@pytest.mark.slow
def test_unstable_options_are_refused_with_the_numbers() -> None:
    # 400 coordinates, one level: omega = 20.
    coarse = dither(levels=1, norm="l2")
    given = np.random.default_rng(1).normal(size=(200, 400)).astype(np.float32)
    with pytest.raises(ValueError, match=r"it is 1\.29 for omega=20, 400 coordinates"):
        run(ecq(coarse), given)
    _, stable, _ = run(ecq(coarse, alpha=0.1), given)  # 0.2 + 0.64 = 0.84
    assert np.sum(stable[100:] ** 2, axis=1).max() < 100 * np.sum(given[0] ** 2) * 20
    with pytest.raises(ValueError, match="`ecq` takes an unbiased codec that states its"):
        ecq(top_k(k=1))
