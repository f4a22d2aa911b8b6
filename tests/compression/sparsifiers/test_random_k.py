"""Random-k: the same coordinates everywhere, and every set of them as likely."""

from itertools import combinations

import jax
import numpy as np
import scipy.stats

from jaxcomm.compression import scaled
from jaxcomm.compression.sparsifiers import _random_k, random_k
from jaxcomm.compression.sparsifiers._random_k import ROW, draw_coordinates
from tests.codecs import sent

X = np.random.default_rng(0).normal(size=(4, 25)).astype(np.float32)


def test_all_sets_are_equally_likely() -> None:
    keys = jax.random.split(jax.random.key(2), 20000)
    sets = np.asarray(jax.jit(jax.vmap(lambda key: draw_coordinates(key, 6, 3)))(keys))
    names = {chosen: number for number, chosen in enumerate(combinations(range(6), 3))}
    counts = np.bincount([names[tuple(map(int, each))] for each in sets], minlength=20)
    assert scipy.stats.chisquare(counts).pvalue > 1e-6


def test_exactly_k_are_sent_and_scaled() -> None:
    for codec, factor in ((random_k(k=8), 12.5), (scaled(random_k(k=8)), 1)):
        found = sent(codec, X)
        assert np.count_nonzero(found) == 8
        np.testing.assert_allclose(found[found != 0], factor * X[found != 0], rtol=1e-6)


def test_keeping_everything_is_the_identity() -> None:
    for codec in (random_k(ratio=1.0), random_k(k=200)):
        np.testing.assert_array_equal(sent(codec, X), X)
        assert codec.claims.variance(100, 1) == 0


def test_sums_of_any_size() -> None:
    for size in (ROW, ROW + 1, 3 * ROW - 1):
        assert _random_k._sum(np.ones(size, np.float32)) == size
