"""What is not zero, of one worker or of all: exact where it fits, and fair where it does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm.compression import _bits, _support
from jaxcomm.compression.sketches import count_sketch
from jaxcomm.compression.sparsifiers import nonzero, nonzero_union
from tests.codecs import draws, send
from tests.steps import steps


def test_rows_of_a_large_union_take_turns() -> None:
    x = np.ones((40, 3), np.float32)
    codec = nonzero_union(density=0.3, overflow="drop")
    decoded = draws(codec, x, 300)
    sent = (decoded != 0).all(axis=2)
    assert (sent.sum(axis=1) == 12).all()  # ceil(0.3 * 40), each whole.
    np.testing.assert_array_equal(decoded[sent], 1)
    # 300 draws of probability 0.3: no row is off by 5 deviations.
    assert np.abs(sent.mean(axis=0) - 0.3).max() < 5 * (0.3 * 0.7 / 300) ** 0.5
    assert codec.claims.contraction(120, 1) == 0.3


@pytest.mark.slow
def test_a_window_is_cyclic() -> None:
    mask = np.zeros(70, bool)
    mask[[3, 20, 33, 34, 64, 69]] = True
    words, parts = _bits.pack_bits(jnp.asarray(mask)), _support.Parts(70, 1, 70)
    order = np.asarray(_support.members(words, 0, 6, parts)).tolist()
    for seed in range(5):
        key = jax.random.key(seed)
        window = np.asarray(_support.window(words, key, 4, parts)).tolist()
        start = order.index(window[0])
        assert window == (order + order)[start : start + 4]
        assert np.asarray(_support.window(words, key, 9, parts)).tolist() == [*order, 70, 70, 70]


def test_overflow_is_reported_for_one_worker() -> None:
    rng, x = np.random.default_rng(0), np.zeros((40, 3))
    x[rng.choice(40, 9, replace=False)] = rng.normal(size=(9, 3)).astype(np.float32)
    codec = nonzero(density=0.1, overflow="drop")
    decoded, memory = send(codec, codec.init(x), x)
    largest = np.argsort(-(x**2).sum(axis=1))[:4]
    expected = np.zeros_like(x)
    expected[largest] = x[largest]
    np.testing.assert_array_equal(decoded, expected)
    assert int(memory.report.overflow) == 5


@pytest.mark.slow
def test_a_sketch_by_tiles_is_added_and_decoded() -> None:
    # A tile of 1024 has no collisions: three workers' tables in one of 1024 columns are exact.
    x = np.random.default_rng(0).normal(size=(3, 900)).astype(np.float32)
    tx = jaxcomm.all_reduce_mean(count_sketch(sketch_ratio=1.1, hashing="tiles"))
    np.testing.assert_allclose(steps(tx, x[None])[0][0, 0], x.mean(axis=0), atol=1e-6)
