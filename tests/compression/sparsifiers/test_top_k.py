"""Limits of top-k, its blocks, and the threshold from a sample."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.compression.sparsifiers import top_k
from tests.codecs import context_of, send

SAMPLED = {k: top_k(k=k, sample_ratio=0.1) for k in (80, 150)}


def sent(codec: object, x: np.ndarray) -> np.ndarray:
    x = jnp.asarray(x, jnp.float32)
    return send(codec, codec.init(x), x)[0]


def exact(x: np.ndarray, k: int) -> np.ndarray:
    """x at its k largest magnitudes, which are distinct."""
    return np.where(np.abs(x) >= np.sort(np.abs(x))[-k], x, 0)


def normal(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


@pytest.mark.parametrize(
    "codec", [top_k(ratio=1.0), top_k(k=20), top_k(k=50)], ids=["ratio", "k", "more"]
)
def test_all_of_it_is_the_identity(codec: object) -> None:
    np.testing.assert_array_equal(sent(codec, normal(20)), normal(20))
    assert codec.claims.contraction(20, 1) == 1


@pytest.mark.parametrize("k", [1, 3, 19])
def test_the_largest(k: int) -> None:
    np.testing.assert_array_equal(sent(top_k(k=k), normal(20)), exact(normal(20), k))


def test_shapes_are_kept() -> None:
    x = normal(24).reshape(2, 3, 4)
    np.testing.assert_array_equal(sent(top_k(k=5), x), exact(x.ravel(), 5).reshape(2, 3, 4))
    assert sent(top_k(k=5), np.float32(3)) == 3


def test_each_block_sends_its_own() -> None:
    x = normal(22) * 10.0 ** np.repeat([0, 3, -3], [8, 8, 6])
    x = x.astype(np.float32)
    expected = np.concatenate([exact(x[:8], 2), exact(x[8:16], 2), exact(x[16:], 2)])
    np.testing.assert_array_equal(sent(top_k(k=2, block_size=8), x), expected)


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(4))
def test_a_sample_finds_the_largest_or_half_as_many(seed: int) -> None:
    # The estimate of the threshold varies; what is chosen are the largest all the same.
    x = np.random.default_rng(seed).standard_t(3, size=4000).astype(np.float32)
    q = sent(SAMPLED[80], x)
    count = np.count_nonzero(q)
    assert 40 <= count <= 80
    np.testing.assert_array_equal(q, exact(x, count))


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["sampled_too_large", "sampled_too_small", "constant"])
def test_a_misleading_sample_is_not_believed(name: str) -> None:
    x = normal(1000, seed=1)
    scale = {"sampled_too_large": 1e3, "sampled_too_small": 1e-3, "constant": 1}[name]
    x[::10] *= np.float32(scale)
    k = 150
    if name == "constant":
        x = np.full(1000, -0.5, np.float32)
        assert np.count_nonzero(sent(SAMPLED[k], x)) == k
        return
    np.testing.assert_array_equal(sent(SAMPLED[k], x), exact(x, k))


def test_values_in_bfloat16() -> None:
    x = normal(20)
    codec = top_k(k=4, value_dtype="bfloat16")
    payload = jax.eval_shape(lambda x: codec.encode(context_of(codec, x), x)[0], x)
    assert payload.values.dtype == jnp.bfloat16
    rounded = np.asarray(jnp.asarray(exact(x, 4)).astype(jnp.bfloat16), np.float64)
    np.testing.assert_array_equal(sent(codec, x), rounded)


@pytest.mark.parametrize(
    "options, name",
    [
        ({}, "ratio"),
        ({"ratio": 0.1, "k": 3}, "ratio"),
        ({"ratio": 0.0}, "ratio"),
        ({"ratio": 1.5}, "ratio"),
        ({"k": 0}, "k"),
        ({"k": True}, "k"),
        ({"k": 2, "block_size": 0}, "block_size"),
        ({"k": 2, "block_size": 4, "sample_ratio": 0.1}, "sample_ratio"),
        ({"k": 2, "value_dtype": "float16"}, "value_dtype"),
    ],
)
def test_options_out_of_range(options: dict, name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}`"):
        top_k(**options)


def test_under_vmap() -> None:
    codec, given = SAMPLED[150], jnp.asarray(normal(2000).reshape(2, 1000))

    def one(x: jax.Array) -> jax.Array:
        payload, _ = codec.encode(context_of(codec, x), x)
        return codec.decode(context_of(codec, x).received(), payload)

    together = np.asarray(jax.jit(jax.vmap(one))(given), np.float64)
    for row, x in zip(together, given, strict=True):
        np.testing.assert_array_equal(row, sent(codec, np.asarray(x)))
