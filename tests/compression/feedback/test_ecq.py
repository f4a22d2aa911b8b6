"""ECQ-SGD: damped compensation, from its recursion."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxcomm import Claims, Codec, Coins, Memory
from jaxcomm.compression.feedback import ecq, error_feedback
from jaxcomm.compression.feedback._loop import FeedbackMemory
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import top_k
from tests.codecs import context_of
from tests.compression.feedback.test_error_feedback import run


def quantizer() -> Codec:
    return dither(levels=4)


def draw(steps: int = 40) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(steps, 24)).astype(np.float32)


def test_errors_are_a_geometric_sum() -> None:
    given = draw()
    sent, kept = run(ecq(quantizer(), alpha=0.3, decay=0.8), jnp.asarray(given))
    ages = np.arange(40)[:, None] - np.arange(40)[None]
    weights = np.where(ages >= 0, 0.8 ** np.maximum(ages, 0), 0)
    np.testing.assert_allclose(kept, weights @ (given - sent), rtol=0, atol=1e-5)
    assert np.abs(kept).max() > 0.1


def test_what_is_sent_is_unbiased_for_the_compensated_update() -> None:
    codec, x, error = ecq(quantizer()), *map(jnp.asarray, draw(2))
    memory = Memory(FeedbackMemory(error, ()), ())

    def once(key: jax.Array) -> jax.Array:
        context = context_of(codec, x, Coins(key, key), memory)
        payload, _ = codec.encode(context, x)
        return codec.decode(context.received(), payload)

    keys = jax.random.split(jax.random.key(0), 4000)
    sample = np.asarray(jax.jit(jax.vmap(once))(keys), np.float64)
    aim = np.asarray(x) + 0.2 * np.asarray(error)
    target = codec.diagnose(context_of(codec, x, memory=memory), x, memory).target
    np.testing.assert_allclose(target, aim, rtol=1e-6)
    allowed = scipy.stats.norm.isf(1e-6 / 24) * sample.std(axis=0) / 4000**0.5 + 1e-6
    assert np.all(np.abs(sample.mean(axis=0) - aim) <= allowed)


def test_limits() -> None:
    given = jnp.asarray(draw())
    plain = run(ecq(quantizer(), alpha=0, decay=0), given)[0]
    np.testing.assert_array_equal(run(ecq(quantizer(), alpha=0), given)[0], plain)
    # Without compensation, what is kept is the last error of the quantizer itself.
    _, kept = run(ecq(quantizer(), alpha=0, decay=0), given)
    np.testing.assert_allclose(kept, given - plain, rtol=0, atol=1e-6)
    full, fed_back = (
        run(ecq(dither(), alpha=1, decay=1), given),
        run(error_feedback(dither()), given),
    )
    np.testing.assert_allclose(full, fed_back, rtol=0, atol=1e-4)


def test_unstable_options_are_refused_with_the_numbers() -> None:
    # 400 coordinates, one level: omega = 20.
    coarse, given = (
        dither(levels=1, norm="l2"),
        jnp.asarray(np.random.default_rng(1).normal(size=(200, 400)), jnp.float32),
    )
    with pytest.raises(ValueError, match=r"it is 1\.29 for omega=20, 400 coordinates"):
        run(ecq(coarse), given)
    _, stable = run(ecq(coarse, alpha=0.1), given)  # 0.2 + 0.64 = 0.84
    assert np.sum(stable[100:] ** 2, axis=1).max() < 100 * np.sum(np.asarray(given[0]) ** 2) * 20
    unchecked = coarse.replace(claims=Claims(variance=lambda size, workers: 0.0))
    assert not np.sum(run(ecq(unchecked, alpha=0.9, decay=1), given)[1][-1] ** 2) < 1e15


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="`ecq` takes an unbiased codec that states its"):
        ecq(top_k(k=1))
    with pytest.raises(ValueError, match=r"`alpha` must be a Python float in \[0, 1\], got 2"):
        ecq(quantizer(), alpha=2)
    with pytest.raises(ValueError, match=r"`decay` must be a Python float in \[0, 1\], got -1"):
        ecq(quantizer(), decay=-1)
