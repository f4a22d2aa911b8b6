"""DIANA: unbiased at every step, and without noise where updates come to rest."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import jaxcomm
from jaxcomm.compression.feedback import diana
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import top_k
from tests.compression.feedback.test_ef21 import ONES, WORKERS, D, draw, shifts
from tests.slow import slow
from tests.workers import aggregator, initial

QUANTIZER = dither(levels=2, norm="l2")
# The laws are held by what is summed.
AGGREGATORS = pytest.mark.parametrize(
    "aggregate", [jaxcomm.all_gather_mean, slow(jaxcomm.all_reduce_mean)]
)


def advanced(tx: Any, count: int) -> tuple[Any, Any, np.ndarray]:
    run, state = aggregator(tx, WORKERS, "vmap"), initial(tx, jnp.zeros((WORKERS, D)), "vmap")
    results = []
    for seed in range(count):
        result, state = run(jnp.asarray(draw(seed), jnp.float32), state, ONES)
        results.append(np.asarray(result[0]))
    return run, state, np.stack(results)


@pytest.mark.slow
@AGGREGATORS
def test_unbiased_after_any_number_of_steps(aggregate: Any) -> None:
    run, state, _ = advanced(aggregate(diana(QUANTIZER)), 5)
    own, shared = shifts(state)
    np.testing.assert_allclose(shared, own.mean(axis=0), rtol=0, atol=1e-6)
    assert np.abs(shared).max() > 0.1
    # omega of d coordinates of the workers that share a norm: all where payloads are summed.
    together = WORKERS if aggregate is jaxcomm.all_reduce_mean else 1
    omega = min(together * D / 4, (together * D) ** 0.5 / 2)
    np.testing.assert_allclose(state.shared[0].rate, 1 / (1 + omega), rtol=1e-6)
    given, draws = draw(9), 4000
    once = lambda key: run(jnp.asarray(given, jnp.float32), state._replace(key=key), ONES)[0][0]  # noqa: E731
    sample = np.asarray(jax.jit(jax.vmap(once))(jax.random.split(jax.random.key(1), draws)))
    deviation = sample.std(axis=0) / draws**0.5
    threshold = scipy.stats.norm.isf(1e-6 / D)
    assert np.all(np.abs(sample.mean(axis=0) - given.mean(axis=0)) <= threshold * deviation + 1e-6)
    # The variance is that of quantizing x_i - h_i, from its definition.
    differences = given - own
    norms = np.linalg.norm(differences, axis=1, keepdims=True)
    norm = np.linalg.norm(differences) if together > 1 else norms
    fractions = differences / norm * 2 % 1
    exact = np.sum((norm / 2 / WORKERS) ** 2 * fractions * (1 - fractions))
    errors = np.sum((sample - given.mean(axis=0)) ** 2, axis=1)
    assert errors.mean() == pytest.approx(exact, abs=5 * errors.std() / draws**0.5)


def test_biased_codecs_are_refused() -> None:
    with pytest.raises(ValueError, match="`diana` takes an unbiased codec that states its"):
        diana(top_k(k=1))
