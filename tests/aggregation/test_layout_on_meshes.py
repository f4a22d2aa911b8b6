"""Leaves where they lie, and in stacks, on meshes of any kind; and what is sent of large ones."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcomm import _units
from jaxcomm.aggregation import all_gather_mean, all_reduce_mean, two_stage_mean
from jaxcomm.compression import blockwise, scaled
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither, scaled_signs
from tests.aggregation.runs import prepared, sent
from tests.slow import slow
from tests.workers import meshes_of

ON_MESHES = {
    "shared_statistics": lambda: all_reduce_mean(error_feedback(scaled(dither(levels=2)))),
    "independent": lambda: two_stage_mean(error_feedback(blockwise(dither(levels=3), 4))),
    "stacked": lambda: two_stage_mean(error_feedback(scaled_signs())),
    "stacked and summed": lambda: all_reduce_mean(dither(bits=8), scope="leaf"),
}
SUM_INTEGERS = {"shared_statistics", "stacked and summed"}  # Others add what decoding rounded.


@pytest.mark.slow
@pytest.mark.parametrize("workers", [8, slow(1)])
@pytest.mark.parametrize("method", ON_MESHES)
def test_on_meshes_as_simulated(method: str, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On both kinds, and in bfloat16 too."""
    monkeypatch.setattr(_units, "LARGE", 32)
    tx = optax.chain(ON_MESHES[method](), optax.sgd(1.0))
    start = {
        "a": jnp.zeros(5),
        "b": jnp.zeros(5),
        "large": jnp.zeros((16, 4)),
        "larger": jnp.zeros((9, 8), jnp.bfloat16),
    }

    def loss(params: Any, rows: jax.Array) -> jax.Array:
        flat = [jnp.ravel(x).astype(jnp.float32) for x in jax.tree.leaves(params)]
        return rows[0] @ jnp.concatenate(flat)

    batch = np.random.default_rng(0).standard_normal((workers, 146)).astype(np.float32)
    found = []
    for where in (workers, *meshes_of(workers)):
        step, state = prepared(loss, tx, start, where)
        params = start
        for _ in range(2):
            params, state, _ = step(params, state, batch)
        found.append(jax.tree.map(lambda x: np.asarray(x, np.float32), params))
        assert np.any(found[-1]["large"])
    for other in found[1:]:
        for name, x in start.items():
            bits = 0.0 if method in SUM_INTEGERS else 4 * float(jnp.finfo(x.dtype).eps)
            np.testing.assert_allclose(other[name], found[0][name], rtol=bits, atol=bits)


@pytest.mark.parametrize(("size", "words"), [(300 * 218, 65400 + 13), (300 * 300, 90112)])
def test_large_messages_are_whole_tiles(size: int, words: int) -> None:
    """Codes, then a norm and a flag of 4 bytes each: filled up from 2**16 on."""
    updates = {"a": jnp.zeros((4, 5)), "large": jnp.zeros((4, 300, size // 300))}
    assert sent(all_gather_mean(dither(bits=8)), updates).bytes_per_worker == 3 * words
