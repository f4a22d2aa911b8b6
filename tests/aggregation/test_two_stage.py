"""Two stages: messages of bytes, blocks, narrow floats, and mistakes."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxcomm
from jaxcomm import _collectives
from jaxcomm._collectives import from_message, to_message
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import nonzero
from pallas_kernels._dispatch import Device
from tests.aggregation.runs import refuse
from tests.aggregation.test_memory import remainders
from tests.slow import slow
from tests.workers import aggregate, gradients


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint16, jnp.float32])
def test_tiled_messages_round_trip(dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a TPU lays them out: what fills tiles first, and of it each tile of 8 rows by itself."""
    shapes = [(40,), (3, 32, 256), (2**12,), (), (64, 100), (512, 128), (8, 256), (0, 128)]
    tree = [(jnp.arange(np.prod(shape)) % 251).reshape(shape).astype(dtype) for shape in shapes]
    tree.append(jnp.float32(-0.1))
    by_rows = to_message(tree)
    monkeypatch.setattr(_collectives, "target", lambda: Device("tpu", "TPU v5 lite"))
    by_tiles = to_message(tree)
    assert by_tiles.shape == by_rows.shape and by_tiles.shape[1] == 128
    first = lax.bitcast_convert_type(tree[1][0, :8, :128], by_tiles.dtype)
    np.testing.assert_array_equal(by_tiles[:8], first)
    for given, back in zip(tree, from_message(by_tiles, tree), strict=True):
        np.testing.assert_array_equal(back, given)
        assert back.dtype == given.dtype


@pytest.mark.parametrize("workers", [3, *map(slow, (1, 2, 8))])
def test_bfloat16_words_and_float32_sums(workers: int) -> None:
    updates = gradients(workers)
    results = aggregate(jaxcomm.mean(wire_dtype=jnp.bfloat16), updates)
    for name, result in results.items():
        given = np.asarray(updates[name])
        rounded = np.asarray(jnp.asarray(given, jnp.bfloat16).astype(jnp.float32))
        mean = jnp.asarray(rounded.mean(axis=0, dtype=np.float64), jnp.float32)
        expected = np.asarray(mean.astype(jnp.bfloat16).astype(jnp.float32))
        # One ulp of bfloat16, where the order of float32 sums decides a rounding.
        np.testing.assert_allclose(result[0], expected, rtol=2.0**-7)
        assert np.mean(result[0] == expected) > 0.5


MISTAKES = {
    "takes codecs whose memory is each worker's own": lambda: jaxcomm.init(
        jaxcomm.two_stage_mean(remainders()), jnp.zeros(3), 2
    ),
    # Runs have no rows.
    r"two axes .* `scope`='leaf', .* `ownership`='cyclic'": lambda: aggregate(
        jaxcomm.two_stage_mean(nonzero(density=0.5), ownership="block", scope="leaf"),
        jnp.ones((3, 64, 1)),
    ),
    "`wire_dtype` must be bfloat16 or a float8, such": lambda: jaxcomm.mean(wire_dtype=jnp.int8),
    r"`merged_mean` needs a merge, .*`combine`='sum'": lambda: jaxcomm.merged_mean(dither()),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_named(message: str) -> None:
    refuse(message, MISTAKES[message])
