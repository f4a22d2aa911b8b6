"""All parts of Deep Gradient Compression against its equations, and its limits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import top_k
from tests.slow import slow
from tests.workers import aggregator, initial

STEPS, WORKERS, SIZE = 6, 3, 24


def updates(workers: int = WORKERS) -> np.ndarray:
    rng = np.random.default_rng(workers)
    return rng.normal(size=(STEPS, workers, SIZE)).astype(np.float32)


def run(tx: Any, steps: np.ndarray, mode: str = "vmap") -> tuple[np.ndarray, list[Any]]:
    workers = steps.shape[1]
    state, results, states = initial(tx, jnp.asarray(steps[0]), mode), [], []
    for step in steps:
        result, state = aggregator(tx, workers, mode)(jnp.asarray(step), state, jnp.ones(workers))
        results.append(np.asarray(result[0], np.float64))
        states.append(state)
    return np.stack(results), states


def memories(state: Any) -> tuple[np.ndarray, np.ndarray]:
    """u and v of every worker."""
    momentum = getattr(state, "inner", state).own.per_worker["data"][0]
    return np.asarray(momentum.kept, np.float64), np.asarray(momentum.inner.kept, np.float64)


def by_hand(
    steps: np.ndarray, counts: list[int], momentum: float, nesterov: bool, clip: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    u, v, means = np.zeros(steps.shape[1:]), np.zeros(steps.shape[1:]), []
    for count, step in zip(counts, steps.astype(np.float64), strict=True):
        norms = np.linalg.norm(step, axis=1, keepdims=True)
        g = step * np.minimum(1, clip / np.sqrt(len(step)) / norms)
        u = momentum * (u + g) if nesterov else momentum * u + g
        v = v + u + g if nesterov else v + u
        mask = np.zeros_like(v, bool)
        for worker, row in enumerate(v):
            mask[worker, np.argsort(-np.abs(row))[:count]] = True
        means.append((v * mask).mean(axis=0))
        u, v = u * ~mask, v * ~mask
    return np.stack(means), u, v


@pytest.mark.slow
@pytest.mark.parametrize(("nesterov", "mode"), [slow(False, "vmap"), (True, "checked")])
def test_against_the_equations(nesterov: bool, mode: str) -> None:
    tx = jaxcomm.deep_gradient_compression(
        ratio=1 / 24, momentum=0.8, nesterov=nesterov, max_norm=4.0, warmup_every=1
    )
    # Of 24: 25 % and 6.25 %; what is below 1 / 24 is not among the stages.
    expected, *kept = by_hand(updates(), [6, 2, 1, 1, 1, 1], 0.8, nesterov, 4.0)
    results, states = run(tx, updates(), mode)
    np.testing.assert_allclose(results, expected, atol=1e-5)
    for mine, other in zip(memories(states[-1]), kept, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"scope": "leaf"}, {"bucket_bytes": 4 * SIZE // 3}], ids=str)
def test_the_clip_is_of_the_whole_gradient_whatever_is_sent_as_one(options: dict) -> None:
    def apart(step: np.ndarray) -> dict[str, jnp.ndarray]:
        sizes = {"a": jnp.float32, "b": jnp.bfloat16, "c": jnp.float32}
        return {
            name: jnp.asarray(part, dtype)
            for (name, dtype), part in zip(sizes.items(), np.split(step, 3, axis=-1), strict=True)
        }

    tx = jaxcomm.deep_gradient_compression(
        ratio=1.0, momentum_masking=False, max_norm=2.0, **options
    )
    # A worker with one large part; one whose parts are all within the limit, and together are not;
    # and one that is within.
    steps = updates() * np.repeat([[30, 1, 1], [0.7, 0.7, 0.7], [0.1, 0.1, 0.1]], SIZE // 3, axis=1)
    state = initial(tx, apart(steps[0]), "checked")
    velocity = np.zeros(SIZE)
    for step in steps:
        given = apart(step)
        results, state = aggregator(tx, WORKERS, "checked")(given, state, jnp.ones(WORKERS))
        assert jax.tree.map(lambda x: x.dtype, results) == jax.tree.map(lambda x: x.dtype, given)
        rounded = np.concatenate([np.asarray(x, np.float64) for x in given.values()], axis=1)
        norms = np.linalg.norm(rounded, axis=1, keepdims=True)
        assert (norms > 2 / 3**0.5).tolist() == [[True], [True], [False]]
        clipped = rounded * np.minimum(1, 2 / 3**0.5 / norms)
        velocity = 0.9 * velocity + clipped.mean(axis=0)
        result = np.concatenate([np.asarray(x[0], np.float64) for x in results.values()])
        np.testing.assert_allclose(result, velocity, rtol=2**-8, atol=1e-6)


def test_sent_and_kept_are_what_there_was_and_masked_where_sent() -> None:
    steps = updates(1)
    results, states = run(jaxcomm.deep_gradient_compression(ratio=0.1, momentum=0.7), steps)
    u, v = np.zeros(SIZE), np.zeros(SIZE)
    for step, result, state in zip(steps[:, 0], results, states, strict=True):
        u = 0.7 * u + step
        v = v + u
        u, after = (x[0] for x in memories(state))
        np.testing.assert_allclose(result + after, v, atol=1e-6)
        sent = result != 0
        assert sent.sum() == 2 and not u[sent].any() and not after[sent].any()
        v = after


@pytest.mark.slow
def test_all_of_it_without_masking_is_momentum_and_with_it_is_sgd() -> None:
    steps = updates()
    means = steps.mean(axis=1, dtype=np.float64)
    kept, _ = run(jaxcomm.deep_gradient_compression(ratio=1.0, momentum_masking=False), steps)
    velocity = np.zeros(SIZE)
    for mean, result in zip(means, kept, strict=True):
        velocity = 0.9 * velocity + mean
        np.testing.assert_allclose(result, velocity, atol=1e-5)
    masked, _ = run(jaxcomm.deep_gradient_compression(ratio=1.0), steps)
    np.testing.assert_allclose(masked, means, atol=1e-6)


@pytest.mark.slow
def test_without_momentum_it_is_top_k_with_error_feedback() -> None:
    plain = jaxcomm.all_gather_mean(error_feedback(top_k(ratio=0.1)))
    mine, _ = run(jaxcomm.deep_gradient_compression(ratio=0.1, momentum=0.0), updates())
    np.testing.assert_array_equal(mine, run(plain, updates())[0])


@pytest.mark.slow
def test_it_trains_with_plain_sgd_behind() -> None:
    rng = np.random.default_rng(9)
    features = jnp.asarray(rng.normal(size=(64, 30)), jnp.float32)
    labels = features @ jnp.asarray(rng.normal(size=30), jnp.float32)
    loss = lambda w, batch: jnp.mean((batch[0] @ w - batch[1]) ** 2)  # noqa: E731
    tx = optax.chain(
        jaxcomm.deep_gradient_compression(
            ratio=0.1, sample_ratio=0.5, max_norm=20.0, warmup_every=20
        ),
        optax.sgd(jaxcomm.warmup_schedule(0.02, steps=20, workers=4)),
    )
    params = jnp.zeros(30)
    step, state = jaxcomm.simulate(loss, tx, 4), jaxcomm.init(tx, params, 4)
    losses = []
    for _ in range(250):
        params, state, metrics = step(params, state, (features, labels))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.01 * losses[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, "`momentum` must be"),
        ({"sample_ratio": 2.0}, "`sample_ratio` must be"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jaxcomm.deep_gradient_compression(**options)
