"""DIANA: unbiased at every step, and without noise where updates come to rest."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import jaxcomm
from jaxcomm.compression.feedback import diana, momentum_correction
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import top_k
from tests.compression.feedback.test_ef21 import ONES, WORKERS, D, descend, draw, shifts
from tests.slow import slow
from tests.workers import aggregator, initial

AGGREGATORS = pytest.mark.parametrize(
    "aggregate", [jaxcomm.all_reduce_mean, jaxcomm.all_gather_mean]
)
# The laws are held by what is summed.
GATHERED = pytest.mark.parametrize(
    "aggregate", [jaxcomm.all_gather_mean, slow(jaxcomm.all_reduce_mean)]
)


def quantizer() -> jaxcomm.Codec:
    return dither(levels=2, norm="l2")


def advanced(tx: Any, steps: int, mode: Any = "vmap") -> tuple[Any, Any, np.ndarray]:
    run, state = aggregator(tx, WORKERS, mode), initial(tx, jnp.zeros((WORKERS, D)), mode)
    results = []
    for seed in range(steps):
        result, state = run(jnp.asarray(draw(seed), jnp.float32), state, ONES)
        results.append(np.asarray(result[0]))
    return run, state, np.stack(results)


@pytest.mark.slow
@AGGREGATORS
@pytest.mark.parametrize("mode", ["checked", slow("vmap")])
def test_shifts_and_their_rate(aggregate: Any, mode: Any) -> None:
    _, state, _ = advanced(aggregate(diana(quantizer())), 6, mode)
    own, shared = shifts(state)
    np.testing.assert_allclose(shared, own.mean(axis=0), rtol=0, atol=1e-6)
    assert np.abs(own).max() > 0.1
    # omega of d coordinates of the workers that share a norm: all where payloads are summed.
    statistics_size = WORKERS if aggregate is jaxcomm.all_reduce_mean else 1
    omega = min(statistics_size * D / 4, (statistics_size * D) ** 0.5 / 2)
    np.testing.assert_allclose(state.shared[0].rate, 1 / (1 + omega), rtol=1e-6)


@pytest.mark.slow
@GATHERED
def test_unbiased_after_any_number_of_steps(aggregate: Any) -> None:
    run, state, _ = advanced(aggregate(diana(quantizer())), 5)
    given, draws = draw(9), 4000
    assert np.abs(shifts(state)[1]).max() > 0.1
    once = lambda key: run(jnp.asarray(given, jnp.float32), state._replace(key=key), ONES)[0][0]  # noqa: E731
    sample = np.asarray(jax.jit(jax.vmap(once))(jax.random.split(jax.random.key(1), draws)))
    deviation = sample.std(axis=0) / draws**0.5
    threshold = scipy.stats.norm.isf(1e-6 / D)
    assert np.all(np.abs(sample.mean(axis=0) - given.mean(axis=0)) <= threshold * deviation + 1e-6)
    # The variance is that of quantizing x_i - h_i, from its definition.
    differences = given - shifts(state)[0]
    norms = np.linalg.norm(differences, axis=1, keepdims=True)
    norm = np.linalg.norm(differences) if aggregate is jaxcomm.all_reduce_mean else norms
    fractions = differences / norm * 2 % 1
    exact = np.sum((norm / 2 / WORKERS) ** 2 * fractions * (1 - fractions))
    errors = np.sum((sample - given.mean(axis=0)) ** 2, axis=1)
    assert errors.mean() == pytest.approx(exact, abs=5 * errors.std() / draws**0.5)


@pytest.mark.slow
@GATHERED
def test_without_shifts_it_is_the_quantizer(aggregate: Any) -> None:
    _, _, plain = advanced(aggregate(quantizer()), 4)
    _, state, still = advanced(aggregate(diana(quantizer(), alpha=0)), 4)
    np.testing.assert_array_equal(still, plain)
    np.testing.assert_array_equal(shifts(state)[0], 0)


@pytest.mark.slow
def test_a_wrapper_hands_shared_memory_on() -> None:
    _, _, bare = advanced(jaxcomm.all_reduce_mean(diana(quantizer())), 5)
    wrapped = momentum_correction(diana(quantizer()), 0.0, momentum_masking=False)
    _, _, inside = advanced(jaxcomm.all_reduce_mean(wrapped), 5)
    np.testing.assert_array_equal(inside, bare)


@pytest.mark.slow
@GATHERED
def test_linear_convergence_where_quantized_descent_plateaus(aggregate: Any) -> None:
    distance = descend(diana(quantizer()), 1000, aggregate)
    assert distance[999] < 1e-4 < 0.1 * distance[100]
    assert descend(quantizer(), 1000, aggregate)[900:].min() > 0.05


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="`diana` takes an unbiased codec that states its"):
        diana(top_k(k=1))
    for alpha in (-0.1, 1.5, jnp.float32(0.5)):
        with pytest.raises(ValueError, match=r"`alpha` must be a Python float in \[0, 1\], or"):
            diana(quantizer(), alpha=alpha)
