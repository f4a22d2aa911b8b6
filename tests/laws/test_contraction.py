"""A contraction loses no more than it says: E|C(x) - x|^2 <= (1 - delta) |x|^2."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxcomm import Codec, Coins
from tests.cases import CASES, Case
from tests.codecs import context_of
from tests.slow import slow

CONTRACTIONS = [c for c in CASES if c.contraction]
DRAWS, SIZE = 3000, 48  # As the law of exact moments, whose programs these are.


def inputs(size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(size)
    return {
        "normal": rng.normal(size=size),
        "heavy_tailed": rng.standard_t(2, size=size),
        "sparse": rng.normal(size=size) * (rng.random(size) < 0.1),
        "one_hot": np.eye(size)[size // 2],
        "constant": np.full(size, -0.7),
        "zero": np.zeros(size),
        "tiny": rng.normal(size=size) * 1e-15,
        "huge": rng.normal(size=size) * 1e15,
    }


@functools.cache
def _compressor(codec: Codec) -> Any:
    def once(x: jax.Array, key: jax.Array) -> jax.Array:
        context = context_of(codec, x, Coins(*jax.random.split(key)))
        payload, _ = codec.encode(context, x)
        return codec.decode(context.received(), payload)

    return jax.jit(jax.vmap(once, in_axes=(None, 0)))


def compressed(codec: Codec, x: jax.Array, draws: int) -> np.ndarray:
    """What a worker alone sends, decoded, [draws, *shape] in float64."""
    keys = jax.random.split(jax.random.key(3), draws)
    return np.asarray(_compressor(codec)(x, keys), np.float64)


def check_contraction(case: Case, size: int) -> None:
    draws = DRAWS if case.random else 1
    for name, given in inputs(size).items():
        x = given.astype(np.float32).astype(np.float64)
        decoded = compressed(case.compressor, jnp.asarray(x, jnp.float32), draws)
        errors = np.sum((decoded - x) ** 2, axis=1)
        slack = scipy.stats.norm.isf(1e-7) * errors.std() / draws**0.5
        bound = (1 - case.contraction(size)) * np.sum(x**2)
        assert errors.mean() - slack <= bound * (1 + 1e-5) + 1e-12 * np.sum(x**2), name


@pytest.mark.parametrize("size", [SIZE, slow(1), slow(7), slow(300)])
@pytest.mark.parametrize("case", CONTRACTIONS, ids=repr)
def test_contraction(case: Case, size: int) -> None:
    check_contraction(case, size)


@pytest.mark.parametrize("size", [7, slow(1), slow(64), slow(300)])
@pytest.mark.parametrize("case", CONTRACTIONS, ids=repr)
def test_the_codec_states_no_more_than_holds(case: Case, size: int) -> None:
    codec = case.compressor
    variance, contraction, _ = codec.claims
    stated = contraction(size, 1) if contraction else 1 - variance(size, 1)
    assert stated <= case.contraction(size) * (1 + 1e-9)
