"""The capacity: what happens if the words exceed it, and errors that name numbers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm import Codec, Context, Fast
from jaxcomm.compression import blockwise, scaled
from jaxcomm.compression.codes import elias, golomb_rice, measured_capacity, rans
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.low_rank import projection
from jaxcomm.compression.quantizers import dither, min_max_dither, scaled_signs, ternary
from jaxcomm.compression.sparsifiers import stc, top_k
from tests.codecs import run
from tests.slow import slow

SIZE, WORKERS = 5000, 3


def given(kind: str = "normal", size: int = SIZE) -> jax.Array:
    x = np.random.default_rng(0).normal(size=(WORKERS, size))
    return jnp.asarray(np.sign(x) if kind == "extreme" else x, jnp.float32)


@functools.cache
def mean_of(codec: Codec) -> Any:
    tx = jaxcomm.all_gather_mean(codec, seed=1)
    return jax.jit(jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data"))


LOSSLESS = [
    (elias, dither(levels=7)),
    slow(golomb_rice, dither(levels=1, norm="l2")),
    slow(rans, min_max_dither(levels=16)),
    slow(elias, blockwise(dither(levels=7), 512)),
    slow(rans, ternary(clip=2.5)),
    slow(golomb_rice, top_k(ratio=0.05)),
    slow(elias, stc(ratio=0.05)),
    slow(functools.partial(elias, capacity=40.0), dither(bits=32)),
    slow(golomb_rice, scaled(dither(levels=7))),
]


def revealed(inner: Codec) -> Codec:
    """The codec, decoded to its integers."""
    integers: Any = inner.fast.integers

    def decode(context: Context, payload: Any) -> jax.Array:
        values = integers.split(context, payload)[0].astype(jnp.float32)[: context.size]
        return jnp.pad(values, (0, context.size - values.size))

    return inner.replace(decode=decode, fast=Fast(integers=integers))


@pytest.mark.parametrize(("code", "inner"), LOSSLESS)
def test_codes_are_lossless(code: Any, inner: Codec) -> None:
    """The integers are equal bit for bit, also of a NaN and an infinity."""
    spoilt = given()[0].at[17].set(jnp.nan).at[300].set(jnp.inf)
    x = jnp.stack([given()[0], jnp.zeros(SIZE), spoilt])

    def decoded(codec: Codec) -> jax.Array:
        def one(x: jax.Array) -> jax.Array:
            context = Context.of(x, memory=codec.init(x))
            context = context.replace(statistics=codec.measure(context, x))
            return codec.decode(context.received(), codec.encode(context, x)[0])

        return jax.jit(jax.vmap(one))(x)

    np.testing.assert_array_equal(decoded(code(revealed(inner))), decoded(revealed(inner)))


@pytest.mark.slow
@pytest.mark.parametrize("code", [elias, slow(golomb_rice), slow(rans)])
def test_an_outlier_needs_no_capacity(code: Any) -> None:
    """All other coordinates of `min_max_dither` are then at one end of its range."""
    normal, uniform = given(size=20_000)[:2], jnp.linspace(4, 6, 20_000)
    x = jnp.stack([normal[0], normal[1], uniform]).at[:, 17].set(jnp.array([1e3, -1e3, 1e3]))
    inner = min_max_dither(levels=5)
    found = mean_of(code(inner))(x)
    np.testing.assert_allclose(found, mean_of(inner)(x), rtol=1e-4, atol=1e-4)


@functools.cache
def decoder(codec: Codec) -> Any:
    def one(x: jax.Array, key: jax.Array) -> Any:
        keys = Context.of(x).keys._replace(shared=key)
        context = Context(keys, codec.init(x), shape=x.shape)
        context = context.replace(statistics=codec.measure(context, x))
        payload, memory = codec.encode(context, x)
        return codec.decode(context.received(), payload), memory.report.overflow

    return jax.jit(jax.vmap(one, in_axes=(None, 0)))


def step_keys(draws: int) -> jax.Array:
    return jax.random.split(jax.random.key(3, impl="threefry2x32"), draws)


@pytest.mark.slow
@pytest.mark.parametrize("code", [elias, slow(golomb_rice), slow(rans)])
def test_fitting_payloads_are_exact_in_both_forms(code: Any) -> None:
    inner, x = dither(levels=7), given()[0]
    capacity = 3.5  # Bits; of plain ones, 4.
    strict, dropping = (
        decoder(code(inner, capacity=capacity, overflow=o)) for o in ("nan", "drop")
    )
    np.testing.assert_array_equal(dropping(x, step_keys(1))[0], strict(x, step_keys(1))[0])


@pytest.mark.parametrize("code", [elias, slow(golomb_rice), slow(rans)])
def test_levels_that_do_not_fit(code: Any) -> None:
    x = given("extreme")[0] * jnp.linspace(0.9, 1, SIZE, dtype=jnp.float32)
    inner, capacity, width = dither(levels=7), 1.0, 4
    strict, dropping = (
        code(inner, capacity=capacity),
        code(inner, capacity=capacity, overflow="drop"),
    )
    assert np.isnan(decoder(strict)(x, step_keys(1))[0]).all()
    exact = decoder(code(inner, capacity=64.0))(x, step_keys(8))[0]
    found, overflow = decoder(dropping)(x, step_keys(8))
    plain = 32 * (int(capacity * SIZE / 32 + 64) + 1) // width
    for row, whole, dropped in zip(np.asarray(found), np.asarray(exact), overflow, strict=True):
        sent = np.flatnonzero(row)
        np.testing.assert_array_equal(row[sent], whole[sent])
        assert len(sent) == SIZE - int(dropped) and abs(len(sent) - plain) <= 32 // width
        assert len(sent) >= capacity / width * SIZE
        assert np.sum(np.diff(sent) > 1) <= 1  # consecutive, perhaps around the end
    assert len({int(np.flatnonzero(row)[0]) for row in np.asarray(found)}) > 3


@pytest.mark.slow
@pytest.mark.parametrize("inner", [top_k(ratio=0.5), stc(ratio=0.5)], ids=["top_k", "stc"])
def test_indices_that_do_not_fit(inner: Codec) -> None:
    x, capacity = given()[0], 1.0
    dropping = golomb_rice(inner, capacity=capacity, overflow="drop")
    assert np.isnan(decoder(golomb_rice(inner, capacity=capacity))(x, step_keys(1))[0]).any()
    whole = np.asarray(decoder(golomb_rice(inner, capacity=64.0))(x, step_keys(1))[0][0])
    found, overflow = decoder(dropping)(x, step_keys(8))
    for row, dropped in zip(np.asarray(found), overflow, strict=True):
        sent = np.flatnonzero(row)
        np.testing.assert_array_equal(row[sent], whole[sent])
        assert len(sent) == SIZE // 2 - int(dropped) < SIZE // 2
        kept = np.flatnonzero(np.isin(np.flatnonzero(whole), sent))
        assert np.sum(np.diff(kept) > 1) <= 1
    assert np.mean(np.asarray(found) != 0) >= capacity / 13 * 0.5


@pytest.mark.slow
def test_feedback_keeps_what_does_not_fit() -> None:
    x = given("extreme")[:1]
    (decoded,), (kept,), _ = run(error_feedback(elias(dither(levels=127), capacity=7.0)), x)
    np.testing.assert_allclose(decoded + kept, x[0], atol=1e-6)


def test_claims() -> None:
    inner = dither(levels=7)
    omega = inner.claims.variance(100, 1)
    strict, dropping = elias(inner, capacity=3.0), elias(inner, capacity=3.0, overflow="drop")
    assert strict.claims == inner.claims and strict.drop_overflow is not None
    assert dropping.claims.variance is None
    assert dropping.claims.contraction(100, 1) == pytest.approx(3 / 4 - omega)
    sparse = golomb_rice(top_k(k=10), capacity=5.0, overflow="drop")
    assert sparse.claims.contraction(1024, 1) == pytest.approx(5 / 10 * 10 / 1024)


def test_mistakes() -> None:
    inner = dither(levels=7)
    with pytest.raises(ValueError, match="`elias` needs a codec of levels or indices"):
        elias(scaled_signs())
    with pytest.raises(ValueError, match=r"feedback outside: `error_feedback\(rans\(codec\)\)`"):
        rans(error_feedback(inner))
    with pytest.raises(ValueError, match="at most 2048 levels, but the codec has 8191"):
        mean_of(rans(dither(levels=4095)))(given())
    with pytest.raises(ValueError, match=r"`elias` needs `capacity`.* a unit of 5000 coordinates"):
        mean_of(elias(dither(levels=2**20)))(given())
    sums = (
        jaxcomm.all_reduce_mean,
        jaxcomm.merged_mean,
        lambda c: projection(2, "right", factor_codec=c),
    )
    for make in sums:
        with pytest.raises(ValueError, match="variable-length code `elias` cannot be added"):
            make(error_feedback(elias(inner)))


@pytest.mark.slow
def test_the_measured_capacity_suffices() -> None:
    x = given("normal", 50_000) ** 3
    for code in (elias, golomb_rice, rans):
        capacity = measured_capacity(code(dither(levels=7)), x)
        codec = code(dither(levels=7), capacity=1.02 * capacity)
        np.testing.assert_allclose(mean_of(codec)(x), mean_of(dither(levels=7))(x), rtol=1e-5)
        with_half = code(dither(levels=7), capacity=capacity / 2)
        assert np.isnan(mean_of(with_half)(x)).all()
