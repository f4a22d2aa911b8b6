"""All parts of Deep Gradient Compression against its equations, and its limits."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from tests.slow import slow
from tests.steps import memory_of, steps

STEPS, WORKERS, SIZE = 6, 3, 24
UPDATES = np.random.default_rng(3).normal(size=(STEPS, WORKERS, SIZE)).astype(np.float32)


def memories(states: Any) -> tuple[np.ndarray, np.ndarray]:
    """u and v of every worker after each step."""
    memory = memory_of(getattr(states, "inner", states))
    return tuple(
        np.asarray(x, np.float64).reshape(STEPS, WORKERS, SIZE)
        for x in (memory.kept, memory.inner.kept)
    )


def by_hand(counts: list[int], momentum: float, nesterov: bool, clip: float) -> list[np.ndarray]:
    """The means of all steps, and u and v after them."""
    u = v = np.zeros((WORKERS, SIZE))
    means, us, vs = [], [], []
    for count, step in zip(counts, UPDATES.astype(np.float64), strict=True):
        norms = np.linalg.norm(step, axis=1, keepdims=True)
        g = step * np.minimum(1, clip / np.sqrt(len(step)) / norms)
        u = momentum * (u + g) if nesterov else momentum * u + g
        v = v + u + g if nesterov else v + u
        mask = np.zeros_like(v, bool)
        np.put_along_axis(mask, np.argsort(-np.abs(v))[:, :count], True, axis=1)
        means.append((v * mask).mean(axis=0))
        u, v = u * ~mask, v * ~mask
        us.append(u)
        vs.append(v)
    return [*map(np.stack, (means, us, vs))]


@pytest.mark.parametrize("nesterov", [True, slow(False)])
def test_against_the_equations(nesterov: bool) -> None:
    tx = jaxcomm.deep_gradient_compression(
        ratio=1 / 24, momentum=0.8, nesterov=nesterov, max_norm=4.0, warmup_every=1
    )
    results, states = steps(tx, UPDATES)
    # Of 24: 25 % and 6.25 %; what is below 1 / 24 is not among the stages.
    expected = by_hand([6, 2, 1, 1, 1, 1], 0.8, nesterov, 4.0)
    for found, each in zip((results[:, 0], *memories(states)), expected, strict=True):
        np.testing.assert_allclose(found, each, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"scope": "leaf"}, {"bucket_bytes": 4 * SIZE // 3}], ids=str)
def test_the_clip_uses_the_norm_of_the_whole_gradient(options: dict) -> None:
    tx = jaxcomm.deep_gradient_compression(
        ratio=1.0, momentum_masking=False, max_norm=2.0, **options
    )
    # A worker with one large part; one whose parts are all within the limit, and together are not;
    # and one that is within.
    scales = np.repeat([[30, 1, 1], [0.7, 0.7, 0.7], [0.1, 0.1, 0.1]], SIZE // 3, axis=1)
    parts = np.split(UPDATES * scales, 3, axis=-1)
    dtypes = {"a": jnp.float32, "b": jnp.bfloat16, "c": jnp.float32}
    given = {
        name: jnp.asarray(x, dtype) for (name, dtype), x in zip(dtypes.items(), parts, strict=True)
    }
    joined = lambda tree: np.concatenate([np.asarray(x, np.float64) for x in tree.values()], -1)  # noqa: E731
    results, _ = steps(tx, given)
    velocity, found = np.zeros(SIZE), joined(results)[:, 0]
    assert {name: x.dtype for name, x in results.items()} == dtypes
    for step, result in zip(joined(given), found, strict=True):
        norms = np.linalg.norm(step, axis=1, keepdims=True)
        assert (norms > 2 / 3**0.5).tolist() == [[True], [True], [False]]
        clipped = step * np.minimum(1, 2 / 3**0.5 / norms)
        velocity = 0.9 * velocity + clipped.mean(axis=0)
        np.testing.assert_allclose(result, velocity, rtol=2**-8, atol=1e-6)
