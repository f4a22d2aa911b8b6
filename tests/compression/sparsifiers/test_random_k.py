"""Random-k: the same coordinates everywhere, and every set of them as likely."""

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

import jaxcomm
from jaxcomm.compression import scaled
from jaxcomm.compression.sparsifiers import random_k
from jaxcomm.compression.sparsifiers._random_k import draw_coordinates
from tests.codecs import send
from tests.workers import draws, flat


def test_every_set_is_as_likely() -> None:
    keys = jax.random.split(jax.random.key(2), 20000)
    sets = np.asarray(jax.jit(jax.vmap(lambda key: draw_coordinates(key, 6, 3)))(keys))
    names = {chosen: number for number, chosen in enumerate(combinations(range(6), 3))}
    counts = np.bincount([names[tuple(map(int, each))] for each in sets], minlength=20)
    assert scipy.stats.chisquare(counts).pvalue > 1e-6


def test_exactly_k_and_scaled() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 25)), jnp.float32)
    q, _ = send(random_k(k=8), (), x)
    assert np.count_nonzero(q) == 8
    np.testing.assert_allclose(q[q != 0], np.asarray(x, np.float64)[q != 0] * 12.5, rtol=1e-6)


def test_all_of_it_is_the_identity() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=33), jnp.float32)
    for codec in (random_k(ratio=1.0), random_k(k=33), random_k(k=100)):
        np.testing.assert_array_equal(send(codec, (), x)[0], x)
        assert codec.claims.variance(33, 1) == 0


def test_workers_send_the_same_coordinates() -> None:
    # The error is that of the mean alone: none where workers cancel out.
    given = jnp.asarray(np.random.default_rng(0).normal(size=(4, 30)), jnp.float32)
    (result,) = draws(jaxcomm.all_reduce_mean(random_k(k=10)), given, 1)
    assert np.count_nonzero(result) == 10
    mean = flat(given).mean(axis=0)
    np.testing.assert_allclose(result[result != 0], 3 * mean[result != 0], rtol=1e-5)


def test_scaled_sends_what_there_is() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=40), jnp.float32)
    q, _ = send(scaled(random_k(k=10)), (), x)
    np.testing.assert_allclose(q[q != 0], np.asarray(x)[q != 0], rtol=1e-6)
    assert np.count_nonzero(q) == 10
