"""Block coordinate descent: blocks, and whose turn it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import jaxcomm
from jaxcomm import Context
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import block_coordinate
from tests.slow import slow
from tests.steps import last, memory_of, steps

WORKERS, SIZE = 3, 11
UPDATES = np.random.default_rng(3).normal(size=(WORKERS, SIZE)).astype(np.float32)


@pytest.mark.parametrize("blocks", [4, slow(1), slow(13)])
def test_a_sweep_sends_each_block_once(blocks: int) -> None:
    tx = jaxcomm.all_reduce_mean(block_coordinate(blocks))
    results, _ = steps(tx, np.stack([UPDATES] * 2 * blocks))
    for step, result in enumerate(results[:, 0]):
        inside = np.array_split(np.arange(SIZE), blocks)[step % blocks]
        expected = np.zeros(SIZE)
        expected[inside] = UPDATES.mean(axis=0)[inside]
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_gauss_southwell_selects_by_the_mean() -> None:
    """A large block cancels between workers; the small one that does not is chosen, until late."""
    own = np.concatenate([np.full(4, 10.0), np.full(4, 0.1)])
    updates = np.stack([own, own * np.array([-1] * 4 + [1] * 4)]).astype(np.float32)
    tx = jaxcomm.all_reduce_mean(block_coordinate(2, "gauss_southwell"))
    results, states = steps(tx, np.stack([updates] * 10))
    chosen = np.argmax(np.asarray(states.shared[0].steps)[:, 0] == 0, axis=-1).ravel()
    assert chosen.tolist() == [1] * 8 + [0, 1]  # Four sweeps of two blocks.
    np.testing.assert_allclose(results[-1, 0], [0] * 4 + [0.1] * 4, rtol=1e-6)


def test_workers_must_agree_on_the_block() -> None:
    tx = jaxcomm.all_gather_mean(block_coordinate(2, "gauss_southwell"))
    with pytest.raises(ValueError, match="needs an aggregator that adds payloads"):
        steps(tx, jnp.ones((1, 2, 4)))


def test_blocks_are_drawn_uniformly() -> None:
    codec, x = block_coordinate(6, "random"), jnp.arange(1.0, 13.0)

    def first(seed: jax.Array) -> jax.Array:
        return codec.encode(Context.of(x, seed=seed), x)[0].values[0]

    drawn = np.asarray(jax.jit(jax.vmap(first))(jnp.arange(6000)))
    values, counts = np.unique(drawn, return_counts=True)
    np.testing.assert_array_equal(values, [1, 3, 5, 7, 9, 11])
    assert scipy.stats.chisquare(counts).pvalue > 1e-6


def test_blocks_of_a_leaf_are_rows() -> None:
    tx = jaxcomm.all_reduce_mean(block_coordinate(2), scope="leaf")
    results, _ = steps(tx, {"w": jnp.ones((1, 2, 4, 3)), "v": jnp.ones((1, 2, 2))})
    np.testing.assert_array_equal(results["w"][0, 0], [[1] * 3, [1] * 3, [0] * 3, [0] * 3])
    np.testing.assert_array_equal(results["v"][0, 0], [1, 0])


def test_a_residual_is_at_most_that_of_a_sweep() -> None:
    """The reason why a cyclic order needs no contraction: with inputs of 1, and 5 blocks."""
    tx = jaxcomm.all_reduce_mean(error_feedback(block_coordinate(5)))
    _, states = steps(tx, jnp.ones((12, 1, 12)))
    # Twelve steps: the blocks of sizes 3, 3, 2, 2, 2 were sent 1, 0, 4, 3, 2 steps ago.
    expected = [1] * 3 + [0] * 3 + [4] * 2 + [3] * 2 + [2] * 2
    np.testing.assert_array_equal(np.ravel(memory_of(last(states)).kept), expected)
