"""EF21: what all share is the mean of what each estimates, and estimates reach what they follow."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm import Codec, Context
from jaxcomm.compression import scaled
from jaxcomm.compression.feedback import diana, ef21, error_feedback, local_clip
from jaxcomm.compression.quantizers import dither, exponential_dither, scaled_signs
from jaxcomm.compression.sparsifiers import top_k
from tests.slow import slow
from tests.steps import steps
from tests.workers import aggregator, initial

WORKERS, D = 4, 10
ONES = jnp.ones(WORKERS)


def shifts(state: Any) -> tuple[np.ndarray, np.ndarray]:
    """Each worker's, [n, d], and what all share, [d]."""
    own, shared = state.own.per_worker["data"][0].kept, state.shared[0].shift
    return np.asarray(own.total, np.float64), np.asarray(shared.total, np.float64)


def draw(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(WORKERS, D))


@pytest.mark.parametrize(
    ("codec", "mode"), [(top_k(k=2), "vmap"), slow(scaled(dither(levels=1)), "checked")]
)
def test_the_update_is_the_mean_of_the_estimates(codec: Codec, mode: Any) -> None:
    tx = jaxcomm.all_gather_mean(ef21(codec))
    run, state = aggregator(tx, WORKERS, mode), initial(tx, jnp.zeros((WORKERS, D)), mode)
    for seed in range(8):
        results, state = run(jnp.asarray(draw(seed), jnp.float32), state, ONES)
        own, shared = shifts(state)
        np.testing.assert_allclose(shared, own.mean(axis=0), rtol=0, atol=1e-6)
        np.testing.assert_array_equal(results, np.tile(shared.astype(np.float32), (WORKERS, 1)))
    assert np.abs(own - own[0]).max() > 0.1


def descend(codec: Codec, steps: int) -> np.ndarray:
    """Gradient descent on quadratics that differ by worker: the distance to the optimum by step."""
    rng = np.random.default_rng(5)
    scales, targets = rng.uniform(0.5, 2, (WORKERS, D)), 5 * rng.normal(size=(WORKERS, D))
    optimum = np.mean(scales * targets, axis=0) / np.mean(scales, axis=0)
    a, b = jnp.asarray(scales, jnp.float32), jnp.asarray(targets, jnp.float32)
    tx = jaxcomm.all_gather_mean(codec)
    run, state = aggregator(tx, WORKERS, "vmap"), initial(tx, b, "vmap")

    def step(carry: Any, _: None) -> Any:
        x, state = carry
        results, state = run(a * (x[None] - b), state, ONES)
        x = x - 0.05 * results[0]
        return (x, state), x

    _, path = jax.jit(lambda s: jax.lax.scan(step, (jnp.zeros(D), s), length=steps))(state)
    return np.linalg.norm(np.asarray(path, np.float64) - optimum, axis=1)


@pytest.mark.slow
def test_linear_convergence_where_workers_disagree() -> None:
    distance = descend(ef21(top_k(k=2)), 600)
    assert distance[599] < 1e-5 < 1e-2 * distance[100]
    # Residuals go on being sent at the optimum, where each worker's gradient is far from 0.
    assert descend(error_feedback(top_k(k=2)), 600)[500:].max() > 1e-2


@pytest.mark.parametrize(
    ("codec", "count"), [(ef21(scaled_signs()), 4_000), slow(diana(dither(levels=7)), 30_000)]
)
def test_the_shared_estimate_does_not_drift(codec: Codec, count: int) -> None:
    given = np.random.default_rng(1).normal(size=(3, 13)).astype(np.float32)
    tx = jaxcomm.all_gather_mean(codec)
    run, state = aggregator(tx, 3, "vmap"), initial(tx, jnp.asarray(given), "vmap")
    step = lambda state, _: (run(jnp.asarray(given), state, jnp.ones(3))[1], None)  # noqa: E731
    state, _ = jax.jit(lambda state: jax.lax.scan(step, state, length=count))(state)
    own, shared = shifts(state)
    # Plain float32 sums differ by 2e-4 after the fewer steps, and ten times as much after more.
    np.testing.assert_allclose(shared, own.mean(axis=0), rtol=0, atol=2e-6)


def test_mistakes() -> None:
    with pytest.raises(ValueError, match=r"`ef21` needs .* bound is 22\.4 for 500 coordinates"):
        steps(jaxcomm.all_gather_mean(ef21(dither(levels=1))), jnp.ones((1, WORKERS, 500)))
    with pytest.raises(ValueError, match="takes codecs whose memory is each worker's own"):
        jaxcomm.init(jaxcomm.two_stage_mean(ef21(top_k(k=1))), jnp.zeros(8), 2)
    for wrapped in (ef21, diana):  # Sums that are rounded again are no mean of what was sent.
        with pytest.raises(ValueError, match=r"`merged_mean` needs .*`combine`=None"):
            jaxcomm.merged_mean(wrapped(exponential_dither()))
        assert wrapped(dither()).combine == "sum"


@pytest.mark.slow
def test_only_finalize_changes_shared_memory() -> None:
    codec = ef21(top_k(k=2))
    kept = lambda context, after: after._replace(shared=context.memory.shared)  # noqa: E731

    def finalize(context: Context, payload: Any, mean: jax.Array) -> Any:
        update, after = codec.finalize(context, payload, mean)
        return update, kept(context, after)

    def encode(context: Context, x: jax.Array) -> Any:
        payload, after = codec.encode(context, x)
        return payload, kept(context, after)

    assert descend(codec.replace(finalize=finalize), 600)[500:].min() > 0.1
    np.testing.assert_array_equal(descend(codec.replace(encode=encode), 9), descend(codec, 9))
    np.testing.assert_allclose(descend(local_clip(codec, 1e9), 9), descend(codec, 9), rtol=1e-5)
