"""Error feedback: nothing is lost, exactly; and what would blow up is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm import Claims, Codec, Context, Fast
from jaxcomm.compression import blockwise, scaled
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.feedback._loop import FeedbackMemory
from jaxcomm.compression.quantizers import cast, dither, sparse_dither
from jaxcomm.compression.sparsifiers import top_k
from pallas_kernels._measurements import observed
from tests.codecs import context_of, run
from tests.slow import slow


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def before(kept: np.ndarray) -> np.ndarray:
    """What was kept before each step."""
    return np.concatenate([np.zeros_like(kept[:1]), kept[:-1]])


@pytest.mark.parametrize("compressor", [top_k(k=3), slow(top_k(k=2, value_dtype="bfloat16"))])
def test_identities_are_exact_on_dyadic_numbers(compressor: Codec) -> None:
    # Multiples of 1/8 below 2**10: float32 adds any number of them without rounding, and what a
    # bfloat16 leaves over is a multiple of 1/8 again.
    given = np.random.default_rng(0).integers(-64, 64, size=(40, 16)) / 8
    sent, kept, _ = run(error_feedback(compressor), given)
    np.testing.assert_array_equal(sent + kept, given + before(kept))
    assert np.count_nonzero(kept) > 40 * 8


@pytest.mark.slow
def test_identities_in_float64() -> None:
    with jax.enable_x64(True):
        codec = error_feedback(cast("bfloat16"), residual_dtype=jnp.float64)
        given = np.random.default_rng(1).normal(size=(30, 16))
        memory, total = codec.init(jnp.asarray(given[0])), np.zeros(16)
        step = jax.jit(codec.encode)
        for t, x in enumerate(given):
            context = context_of(codec, jnp.asarray(x), t, memory)
            payload, memory = step(context, jnp.asarray(x))
            sent = np.asarray(codec.decode(context.received(), payload))
            assert sent.dtype == np.float32 and memory.own.kept.dtype == np.float64
            total += sent
        kept = np.asarray(memory.own.kept)
        np.testing.assert_allclose(total + kept, given.sum(axis=0), rtol=0, atol=1e-14)


def test_a_bfloat16_residual_loses_its_rounding_only() -> None:
    given = normal(40, 16, seed=2)
    codec = error_feedback(top_k(k=3), residual_dtype=jnp.bfloat16)
    assert codec.init(jnp.asarray(given[0])).own.kept.dtype == jnp.bfloat16
    sent, kept, _ = run(codec, given)
    lost = given + before(kept) - sent - kept
    assert np.all(np.abs(lost) <= 2.0**-8 * np.abs(kept) + 1e-6)
    assert np.abs(lost).max() > 1e-4
    with pytest.raises(ValueError, match="must be float32, bfloat16 or float64, got int8"):
        error_feedback(top_k(k=1), residual_dtype="int8")


COARSE = dither(levels=1, norm="l2")
"""One level of the l2 norm for 400 coordinates: an error of 20 times the square."""


@pytest.mark.parametrize(
    ("codec", "workers", "words"),
    [
        (COARSE, 1, r"bound is 20 for 400 coordinates .*scaled\(codec\)"),
        (sparse_dither(capacity=8), 1, "`error_feedback` needs .* no bound is known"),
        (error_feedback(top_k(k=1)), 1, "`error_feedback` needs .* no bound is known"),
        # Feedback counts all workers who share a norm: 8 bits hold fewer levels for 64 of them.
        (dither(bits=10), 64, "coordinates of 64 workers"),
    ],
)
def test_what_is_refused(codec: Codec, workers: int, words: str) -> None:
    codec, x = error_feedback(codec), jnp.ones(400)
    with pytest.raises(ValueError, match=words):
        codec.encode(context_of(codec, x, workers=workers), x)


@pytest.mark.slow
@pytest.mark.parametrize("codec", [scaled(COARSE), slow(blockwise(dither(levels=3, norm="l2"), 8))])
def test_codecs_scaled_to_contractions_stay_bounded(codec: Codec) -> None:
    given = normal(300, 400, seed=3)
    _, kept, _ = run(error_feedback(codec), given)
    # Of a contraction delta, E|e|^2 <= 4 (1 - delta) / delta^2 max |x|^2.
    variance, contraction, _ = codec.claims
    delta = contraction(400, 1) if contraction else 1 - variance(400, 1)
    squares = np.sum(kept**2, axis=1)
    bound = 4 * (1 - delta) / delta**2 * np.max(np.sum(given**2, axis=1))
    assert np.all(squares <= bound) and squares[200:].mean() < 2 * squares[:200].mean()


@pytest.mark.parametrize("wrap", [lambda codec: codec, slow(scaled)])
def test_dither_encodes_and_subtracts_in_one_pass(wrap: Any) -> None:
    """The laws compare the results."""

    def passes(inner: Codec) -> list[Any]:
        with observed() as seen:
            run(error_feedback(inner), normal(2, 50))
        return [(work.op, work.residual) for work in seen]

    codec, decoded = wrap(dither(bits=8)), ("quantize.dequantize", False)
    assert passes(codec) == [("quantize.quantize", True), decoded]
    plain = passes(codec.replace(fast=Fast()))
    assert plain == [("quantize.quantize", False), decoded, decoded]


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
    given, residual = np.array([[8.0, -16.0], [4.0, 32.0], [0.0, 0.0]]), np.array([16.0, 48.0])
    codec = error_feedback(_averaging(), decay=0.25)
    memory = FeedbackMemory(jnp.asarray(residual, jnp.float32), ())
    moved = codec.init(jnp.zeros(2))._replace(own=memory)
    sent, kept, _ = run(codec.replace(init=lambda x: moved), given)
    for x, one_sent, one_kept in zip(given, sent, kept, strict=True):
        whole = x + 0.25 * residual
        residual = whole - whole.mean()
        np.testing.assert_array_equal(one_sent, [whole.mean()] * 2)
        np.testing.assert_array_equal(one_kept, residual)


def test_an_overflowing_residual_is_unchanged() -> None:
    """The payload is finite; the sum of update and residual is not."""
    given = np.array([[3e38, -3e38], [3e38, -3e38], [-1e38, 1e38]])
    sent, kept, _ = run(error_feedback(_averaging()), given)
    np.testing.assert_array_equal(sent, np.zeros((3, 2)))
    np.testing.assert_allclose(kept, [[3e38, -3e38], [3e38, -3e38], [2e38, -2e38]], rtol=1e-6)
