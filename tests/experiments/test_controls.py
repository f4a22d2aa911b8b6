"""The two controls against NumPy, and their bias."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.methods import controls
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
    """It is deterministic, and biased toward zero."""
    norm = np.abs(X).max()
    codes = np.trunc(X * (np.float32(15) / norm))
    expected = codes.sum(axis=0) * norm / (15 * WORKERS)
    found = aggregated(controls.truncating(), X)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_array_equal(aggregated(controls.truncating(1), X), found)
    np.testing.assert_array_equal(aggregated(controls.truncating(), 0 * X), 0)
    mean = X.mean(axis=0)
    assert np.vdot(found, mean) < 0.9 * np.vdot(mean, mean)


def test_top_1_percent_keeps_the_largest_of_each_worker() -> None:
    """At least one coordinate."""
    for x in (X, X[:, :2]):
        kept = np.argsort(-np.abs(x), axis=1)[:, : max(1, x.shape[1] // 100)]
        expected = np.zeros_like(x)
        np.put_along_axis(expected, kept, np.take_along_axis(x, kept, axis=1), axis=1)
        found = aggregated(controls.top_1_percent(), x)
        np.testing.assert_allclose(found, expected.mean(axis=0), rtol=1e-6)


def test_codes_have_the_documented_size() -> None:
    x = jnp.zeros((10, 100))
    codec = controls.truncating_dither()
    sent = jax.eval_shape(lambda x: codec.encode(context_of(codec, x, workers=WORKERS), x)[0], x)
    assert (sent.codes.shape, sent.codes.dtype) == ((10, 100), jnp.int8)
