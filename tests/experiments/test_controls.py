"""The two controls against NumPy, and their bias."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.methods import controls
from jaxcomm import Context
from tests.codecs import context_of

WORKERS, SIZE = 8, 1000
X = np.random.default_rng(0).standard_normal((WORKERS, SIZE)).astype(np.float32)


def aggregated(tx, x: np.ndarray) -> np.ndarray:
    """The update, which is the same on all workers."""

    def on_worker(x: jax.Array) -> jax.Array:
        return tx.update(x, tx.init(x))[0]

    updates = np.asarray(jax.jit(jax.vmap(on_worker, axis_name="data"))(x))
    np.testing.assert_array_equal(updates, np.broadcast_to(updates[:1], updates.shape))
    return updates[0]


def test_truncating_is_the_sum_of_truncated_codes() -> None:
    norm = np.abs(X).max()
    codes = np.trunc(X * (np.float32(15) / norm))
    expected = codes.sum(axis=0) * norm / (15 * WORKERS)
    np.testing.assert_allclose(aggregated(controls.truncating(), X), expected, rtol=1e-5)


def test_truncation_is_deterministic_and_biased_toward_zero() -> None:
    first, second = (aggregated(controls.truncating(seed), X) for seed in (0, 1))
    np.testing.assert_array_equal(first, second)
    mean = X.mean(axis=0)
    assert np.vdot(first, mean) < 0.9 * np.vdot(mean, mean)


def test_truncating_of_zeros_is_zeros() -> None:
    np.testing.assert_array_equal(aggregated(controls.truncating(), 0 * X), 0)


def test_top_1_percent_keeps_the_largest_of_each_worker() -> None:
    kept = np.argsort(-np.abs(X), axis=1)[:, :10]
    expected = np.zeros_like(X)
    np.put_along_axis(expected, kept, np.take_along_axis(X, kept, axis=1), axis=1)
    np.testing.assert_allclose(
        aggregated(controls.top_1_percent(), X), expected.mean(axis=0), rtol=1e-6
    )


def test_top_1_percent_keeps_at_least_one_coordinate() -> None:
    np.testing.assert_array_equal(
        aggregated(controls.top_1_percent(), np.array([[1.0, -4.0], [2.0, 0.0]], np.float32)),
        [1.0, -2.0],
    )


def test_payloads_have_the_documented_sizes() -> None:
    x = jnp.zeros((10, 100))
    context = Context.of(x)
    sent = jax.eval_shape(lambda x: controls.largest(0.01).encode(context, x)[0], x)
    assert (sent.indices.shape, sent.indices.dtype) == ((10,), jnp.int32)
    assert (sent.values.shape, sent.values.dtype) == ((10,), jnp.float32)
    codec = controls.truncating_dither()
    sent = jax.eval_shape(lambda x: codec.encode(context_of(codec, x, workers=WORKERS), x)[0], x)
    assert (sent.codes.shape, sent.codes.dtype) == ((10, 100), jnp.int8)
