"""Memory in the payloads of a codec: what is lost is the rounding, and nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm import Codec, Context, Keys
from jaxcomm._noise import bits
from jaxcomm.compression import blockwise, compressed_memory, rotated
from jaxcomm.compression._compressed_memory import CompressedArray, _keys_of_array
from jaxcomm.compression.feedback import diana, ef21, error_feedback, momentum_correction
from jaxcomm.compression.quantizers import cast, dither
from jaxcomm.compression.sparsifiers import threshold, top_k
from tests.codecs import run, send, sent
from tests.slow import slow

GIVEN = np.random.default_rng(0).normal(size=(40, 5, 8)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("storage", "step"),
    [
        (dither(bits=8), 1 / 127),
        (blockwise(dither(bits=8), 8), 1 / 127),
        (rotated(dither(bits=8)), 8 / 127),
        (cast("bfloat16"), 2.0**-8),
    ],
)
def test_only_the_storage_rounding_is_lost(storage: Codec, step: float) -> None:
    """x + e = m + e' up to a step of the storage, which is e' here as it decodes."""
    codec = compressed_memory(error_feedback(top_k(k=3)), storage)
    plain = error_feedback(top_k(k=3))
    memory, lost, kept = codec.init(jnp.asarray(GIVEN[0])), [], np.zeros((5, 8))
    for number, x in enumerate(GIVEN[:8]):
        exact = x + kept - sent(plain, x + kept)
        found, memory = send(codec, memory, x, number)
        np.testing.assert_allclose(found + exact, x + kept, rtol=0, atol=1e-6)
        kept = decoded(storage, memory.own.kept, x.shape)
        lost.append(np.abs(kept - exact).max() / np.abs(exact).max())
        norm = np.sum(np.square(kept))
        np.testing.assert_allclose(memory.own.kept.square_norm, norm, rtol=1e-5)
    assert 0 < max(lost) <= step


def decoded(storage: Codec, kept: CompressedArray, shape: tuple[int, ...]) -> np.ndarray:
    """By the storage's own functions, from the words that are kept."""
    key = jax.random.wrap_key_data(kept.seeds, impl="threefry2x32")
    context = Context(Keys(key, key), statistics=kept.statistics, shape=shape)
    return np.asarray(storage.decode(context, kept.payload), np.float64)


def test_8_bits_take_a_quarter_of_the_memory() -> None:
    size = lambda codec: sum(x.nbytes for x in jax.tree.leaves(codec.init(jnp.zeros(10_000))))  # noqa: E731
    plain = error_feedback(top_k(ratio=0.01))
    assert size(plain) == 40_000
    assert size(compressed_memory(plain, dither(bits=8))) == 10_000 + 4 + 12


def test_an_average_over_steps() -> None:
    """One coordinate is never sent: its errors are those of an average with weight 1/2."""
    _, residuals, _ = run(error_feedback(top_k(k=1), averaging=0.5), np.tile([8.0, 1.0], (10, 1)))
    expected, kept = [], 0.0
    for _ in range(10):
        kept = 0.5 * kept + 0.5 * (1.0 + kept)
        expected.append(kept)
    np.testing.assert_array_equal(residuals[:, 1], expected)


@pytest.mark.parametrize(
    "storage", [cast("float16"), slow(rotated(dither(bits=8))), slow(threshold(0.1, k=1))]
)
def test_a_payload_that_is_not_finite_is_not_kept(storage: Codec) -> None:
    """Residuals of 1e38 exceed the range of the storage once; later steps must not see a NaN."""
    given = GIVEN.clip(-1, 1)
    given[1] *= 1e38
    found, kept, _ = run(compressed_memory(error_feedback(top_k(k=3)), storage), given)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((found, kept.payload)))


@pytest.mark.slow
def test_arrays_of_a_memory_draw_independently() -> None:
    """Also their first coordinates; over many keys, the bits of two arrays are independent."""
    keys = jax.random.split(jax.random.key(1, impl="threefry2x32"), 64)
    first, second = (
        np.array([bits(_keys_of_array(Keys(key, key), i).private, (8,)) for key in keys])
        for i in (0, 1)
    )
    assert not np.any(first == second)
    sizes = momentum_correction(error_feedback(top_k(k=1)))
    own = compressed_memory(sizes, dither(bits=8)).init(jnp.zeros(9)).own
    stored = [own.kept, own.inner.kept]
    assert all(isinstance(each, CompressedArray) for each in stored)
    assert np.all(stored[0].seeds != stored[1].seeds)


def test_shared_memory_is_refused() -> None:
    for shared in (ef21(top_k(k=1)), diana(dither())):
        with pytest.raises(ValueError, match="memory is each worker's own"):
            compressed_memory(shared, dither(bits=8)).init(jnp.zeros(3))
