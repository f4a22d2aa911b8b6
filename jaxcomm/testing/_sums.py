"""Checks that a sum of payloads decodes to the mean of the decoded payloads, without wrap."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._contract import Codec, Context, PyTree
from jaxcomm.testing._inputs import with_extremes
from jaxcomm.testing._law import require_equal
from jaxcomm.testing._single_worker import sent

SUMS = "sums"


def _add(payload: jax.Array) -> jax.Array:
    """Adds [draws, workers, ...] over workers in NumPy, which wraps in the payload's dtype."""
    return jnp.asarray(np.sum(np.asarray(payload), axis=1, dtype=payload.dtype))


def require_sums(
    codec: Codec, *, workers: int, size: int = 7, draws: int = 16, seed: int = 4
) -> None:
    """Checks that the sum of payloads decodes to the mean of the decoded payloads."""

    def decode(context: Context, payload: PyTree) -> jax.Array:
        return codec.decode(context.received(workers), payload)

    decode_all = jax.jit(jax.vmap(decode))
    for name, x in with_extremes(size, workers).items():
        step = sent(codec, x, draws, seed)
        each = np.asarray(step.decoded, np.float64)
        contexts = jax.tree.map(lambda leaf: leaf[:, 0], step.contexts)
        together = np.asarray(decode_all(contexts, jax.tree.map(_add, step.payloads)), np.float64)
        expected = each.mean(axis=1)
        if codec.drop_overflow is not None:  # A sum may overflow where its parts do not.
            expected = np.where(np.isnan(together).any(axis=1, keepdims=True), np.nan, expected)
        what = f"the mean decoded from the sum, for input {name!r}, {workers} workers, size {size},"
        peak = np.abs(each).max(initial=0, where=np.isfinite(each))
        slack = 5e-7 * max(peak, 1e-30)
        near = np.isclose(together, expected, rtol=1e-5, atol=slack, equal_nan=True)
        require_equal(SUMS, np.where(near, expected, together), expected, what)
