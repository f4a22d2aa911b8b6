"""Error feedback: nothing is lost, exactly; and what would blow up is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm import Claims, Codec, Coins, Context, Fast
from jaxcomm.compression import blockwise, scaled
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.feedback._loop import FeedbackMemory
from jaxcomm.compression.quantizers import cast, dither, sparse_dither
from jaxcomm.compression.sparsifiers import top_k
from pallas_kernels._measurements import observed
from tests.codecs import context_of


def run(codec: Codec, given: jax.Array, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """What a worker alone sends at each step, and what it then keeps, [steps, d] in float64."""

    def step(memory: object, inputs: tuple[jax.Array, jax.Array]) -> tuple[object, object]:
        key, x = inputs
        context = context_of(codec, x, Coins(*jax.random.split(key)), memory)
        payload, memory = codec.encode(context, x)
        sent = codec.decode(context.received(), payload)
        return memory, (sent, memory.own.kept)

    keys = jax.random.split(jax.random.key(seed), len(given))
    _, (sent, kept) = jax.jit(lambda m: jax.lax.scan(step, m, (keys, given)))(codec.init(given[0]))
    return np.asarray(sent, np.float64), np.asarray(kept.astype(jnp.float32), np.float64)


@pytest.mark.parametrize("compressor", [top_k(k=3), top_k(k=2, value_dtype="bfloat16")])
def test_identities_are_exact_on_dyadic_numbers(compressor: Codec) -> None:
    # Multiples of 1/8 below 2**10: float32 adds any number of them without rounding, and what a
    # bfloat16 leaves over is a multiple of 1/8 again.
    given = np.random.default_rng(0).integers(-64, 64, size=(40, 16)) / 8
    sent, kept = run(error_feedback(compressor), jnp.asarray(given, jnp.float32))
    before = np.concatenate([np.zeros((1, 16)), kept[:-1]])
    np.testing.assert_array_equal(sent + kept, given + before)
    np.testing.assert_array_equal(sent.cumsum(axis=0) + kept, given.cumsum(axis=0))
    assert np.count_nonzero(kept) > 40 * 8


@pytest.mark.slow
@pytest.mark.parametrize("compressor", [top_k(k=3), cast("bfloat16")])
def test_identities_in_float64(compressor: Codec) -> None:
    with jax.enable_x64(True):
        codec = error_feedback(compressor, residual_dtype=jnp.float64)
        given = np.random.default_rng(1).normal(size=(30, 16))
        memory, total = codec.init(jnp.asarray(given[0])), np.zeros(16)
        step = jax.jit(codec.encode)
        for t, x in enumerate(given):
            before = np.asarray(memory.own.kept)
            context = context_of(codec, jnp.asarray(x), t, memory)
            payload, memory = step(context, jnp.asarray(x))
            sent = np.asarray(codec.decode(context.received(), payload))
            kept = np.asarray(memory.own.kept)
            assert sent.dtype == np.float32 and kept.dtype == np.float64
            np.testing.assert_allclose(sent + kept, x + before, rtol=1e-15, atol=1e-15)
            total += sent
        np.testing.assert_allclose(total + kept, given.sum(axis=0), rtol=0, atol=1e-14)


def test_a_bfloat16_residual_loses_its_rounding_only() -> None:
    given = jnp.asarray(np.random.default_rng(2).normal(size=(40, 16)), jnp.float32)
    codec = error_feedback(top_k(k=3), residual_dtype=jnp.bfloat16)
    assert codec.init(given[0]).own.kept.dtype == jnp.bfloat16
    sent, kept = run(codec, given)
    before = np.concatenate([np.zeros((1, 16)), kept[:-1]])
    lost = np.asarray(given, np.float64) + before - sent - kept
    assert np.all(np.abs(lost) <= 2.0**-8 * np.abs(kept) + 1e-6)
    assert np.abs(lost).max() > 1e-4


def test_decay_forgets_geometrically() -> None:
    # One coordinate is never sent: what is kept of it is 1 + 1/2 + 1/4 + ...
    given = jnp.tile(jnp.array([[8.0, 1.0]]), (10, 1))
    sent, kept = run(error_feedback(top_k(k=1), decay=0.5), given)
    np.testing.assert_array_equal(sent[:, 1], 0)
    np.testing.assert_array_equal(kept[:, 1], 2 - 0.5 ** np.arange(10))


def test_impossible_dtype() -> None:
    with pytest.raises(
        ValueError, match="`residual_dtype` must be float32, bfloat16 or float64, got int8"
    ):
        error_feedback(top_k(k=1), residual_dtype="int8")


def coarse() -> Codec:
    """One level of the l2 norm for 400 coordinates: an error of 20 times the square."""
    return dither(levels=1, norm="l2")


def test_what_is_refused() -> None:
    x = jnp.ones(400)
    with pytest.raises(ValueError, match=r"bound is 20 for 400 coordinates .*scaled\(codec\)"):
        run(error_feedback(coarse()), x[None])
    with pytest.raises(ValueError, match=r"`error_feedback` needs .* no bound is known"):
        run(error_feedback(sparse_dither(capacity=8)), x[None])
    with pytest.raises(ValueError, match=r"`error_feedback` needs .* no bound is known"):
        run(error_feedback(error_feedback(top_k(k=1))), x[None])
    # Feedback counts all workers who share a norm: 8 bits hold fewer levels for 64 of them.
    codec = error_feedback(dither(bits=10))
    with pytest.raises(ValueError, match="coordinates of 64 workers"):
        codec.encode(context_of(codec, x, workers=64), x)


@pytest.mark.quick(1)
@pytest.mark.parametrize("codec", [scaled(coarse()), blockwise(dither(levels=3, norm="l2"), 8)])
def test_what_is_made_a_contraction_stays_bounded(codec: Codec) -> None:
    given = np.random.default_rng(3).normal(size=(300, 400))
    _, kept = run(error_feedback(codec), jnp.asarray(given, jnp.float32))
    # Of a contraction delta, E|e|^2 <= 4 (1 - delta) / delta^2 max |x|^2.
    variance, contraction, _ = codec.claims
    delta = contraction(400, 1) if contraction else 1 - variance(400, 1)
    bound = 4 * (1 - delta) / delta**2 * np.max(np.sum(given**2, axis=1))
    assert np.all(np.sum(kept**2, axis=1) <= bound)
    late, early = (np.sum(kept[part] ** 2, axis=1).mean() for part in (slice(200, 300), slice(200)))
    assert late < 2 * early


def test_unscaled_it_would_blow_up() -> None:
    given = jnp.asarray(np.random.default_rng(3).normal(size=(300, 400)), jnp.float32)
    unchecked = coarse().replace(claims=Claims(contraction=lambda size, workers: 1.0))
    _, kept = run(error_feedback(unchecked), given)
    assert not np.sum(kept[-1] ** 2) < 1e20


def test_the_virtual_iterate_is_exact_sgd() -> None:
    # f_i(x) = |a_i x - b_i|^2 / 2; x - eta mean(e) moves by -eta mean(grad f_i(x)), as SGD does.
    rng, eta, workers, d = np.random.default_rng(4), 0.05, 3, 12
    scales, targets = rng.uniform(0.5, 2, (workers, d)), rng.normal(size=(workers, d))
    with jax.enable_x64(True):
        codec = error_feedback(top_k(k=2), residual_dtype=jnp.float64)
        memories = [codec.init(jnp.zeros(d)) for _ in range(workers)]
        context = Context.of(jnp.zeros(d))
        encode, decode = jax.jit(codec.encode), jax.jit(codec.decode)
        x = rng.normal(size=d)
        virtual = x.copy()
        for _ in range(200):
            gradients = scales * (scales * x[None] - targets)
            sent = np.zeros(d)
            for i in range(workers):
                own = context.replace(memory=memories[i])
                payload, memories[i] = encode(own, jnp.asarray(gradients[i]))
                sent += np.asarray(decode(context, payload), np.float64)
            x = x - eta * sent / workers
            virtual = virtual - eta * gradients.mean(axis=0)
            kept = np.mean([np.asarray(memory.own.kept) for memory in memories], axis=0)
            np.testing.assert_allclose(x - eta * kept, virtual, rtol=0, atol=1e-13)
    optimum = np.mean(scales * targets, axis=0) / np.mean(scales**2, axis=0)
    assert np.abs(virtual - optimum).max() < 0.3 < np.abs(kept).max()


@pytest.mark.parametrize("residual_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("wrap", [lambda codec: codec, scaled], ids=["plain", "scaled"])
def test_dither_encodes_and_subtracts_in_one_pass(wrap: Any, residual_dtype: Any) -> None:
    """Without the fast path: the same payload, and the same residual but for its last bit."""
    codec = wrap(dither(bits=8))
    assert codec.fast.with_residual is not None
    plain = codec.replace(fast=Fast())

    given = np.random.default_rng(4).normal(size=(20, 50)).astype(np.float32)
    passes = {}

    def steps(inner: Codec) -> tuple[np.ndarray, np.ndarray]:
        with observed() as seen:
            results = run(error_feedback(inner, residual_dtype=residual_dtype), jnp.asarray(given))
        passes[inner is codec] = [(work.op, work.residual) for work in seen]
        return results

    (sent, kept), (expected, expected_kept) = steps(codec), steps(plain)
    encoded, decoded = ("quantize.quantize", True), ("quantize.dequantize", False)
    assert passes == {
        True: [encoded, decoded],
        False: [("quantize.quantize", False), decoded, decoded],
    }
    # The residuals part in their last bits, so that later codes may differ by a level.
    first = 2.0**-20 if residual_dtype == jnp.float32 else 2.0**-7
    np.testing.assert_array_equal(sent[0], expected[0])
    np.testing.assert_allclose(kept[0], expected_kept[0], atol=first)
    before = np.concatenate([np.zeros((1, 50)), kept[:-1]])
    precision = 1e-5 if residual_dtype == jnp.float32 else 2.0**-7 * np.abs(kept).max()
    np.testing.assert_allclose(sent + kept, given + before, atol=precision)


def _averaging() -> Codec:
    """A linear codec that sends the mean of its input."""

    def encode(context: Context, x: jax.Array) -> tuple[jax.Array, Any]:
        return jnp.sum(x / x.size, keepdims=True), context.memory

    return Codec(
        encode=encode,
        decode=lambda context, payload: jnp.broadcast_to(payload, context.shape),
        claims=Claims(contraction=lambda size, workers: 0.1),  # Not for inputs of mean 0.
        fast=Fast(linear=("encode",)),
    )


def test_the_terms_of_a_linear_codec_have_the_coefficient_of_the_residual() -> None:
    """From a residual whose mean is not 0: those of later steps have none to send."""
    given = jnp.array([[8.0, -16.0], [4.0, 32.0], [0.0, 0.0]])
    codec = error_feedback(_averaging(), decay=0.25)
    moved = codec.init(given[0])._replace(own=FeedbackMemory(jnp.array([16.0, 48.0]), ()))
    sent, kept = run(codec.replace(init=lambda x: moved), given)
    residual = np.array([16.0, 48.0])
    for x, one_sent, one_kept in zip(np.asarray(given), sent, kept, strict=True):
        whole = x + 0.25 * residual
        residual = whole - whole.mean()
        np.testing.assert_array_equal(one_sent, [whole.mean()] * 2)
        np.testing.assert_array_equal(one_kept, residual)


def test_a_residual_that_would_overflow_is_as_before() -> None:
    """The payload is finite; the sum of update and residual is not."""
    given = jnp.array([[3e38, -3e38], [3e38, -3e38], [-1e38, 1e38]])
    sent, kept = run(error_feedback(_averaging()), given)
    np.testing.assert_array_equal(sent, np.zeros((3, 2)))
    np.testing.assert_allclose(kept, [[3e38, -3e38], [3e38, -3e38], [2e38, -2e38]], rtol=1e-6)
