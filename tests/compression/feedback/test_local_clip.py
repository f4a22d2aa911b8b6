"""Local clipping: the norm, the direction, at every scale, and before anything else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.compression.feedback import error_feedback, local_clip
from jaxcomm.compression.quantizers import cast, dither
from jaxcomm.compression.sparsifiers import top_k
from tests.codecs import context_of, send, sent
from tests.slow import slow

EVERYTHING = cast("float32")


@pytest.mark.parametrize("shape", [(5, 7), slow((300,)), slow(())], ids=str)
def test_the_norm_and_the_direction(shape: tuple[int, ...]) -> None:
    def through(x: jax.Array, most: jax.Array) -> jax.Array:
        codec = local_clip(EVERYTHING, most)
        context = context_of(codec, x)
        return codec.decode(context.received(), codec.encode(context, x)[0])

    clip = jax.jit(through)
    for scale in [1e-36, 1e-30, 1e-10, 1.0, 1e10, 1e30, 1e37]:
        x = scale * np.random.default_rng(0).uniform(0.2, 1, size=shape)
        x = x.astype(np.float32).astype(np.float64)
        norm = np.linalg.norm(x)
        for most in (norm / 3, norm * 0.999):
            clipped = clip(jnp.float32(x), jnp.float32(most))
            np.testing.assert_allclose(clipped, x / norm * most, rtol=3e-6)
        for most in (norm * 1.001, norm * 30):
            clipped = clip(jnp.float32(x), jnp.float32(min(most, 3e38)))
            np.testing.assert_array_equal(clipped, x)


def test_norms_beyond_float32_and_zero() -> None:
    codec = local_clip(EVERYTHING, 2.0)
    np.testing.assert_allclose(sent(codec, np.full(1000, 3e38)), 2 / 1000**0.5, rtol=1e-5)
    np.testing.assert_array_equal(sent(codec, np.zeros(7)), 0)
    assert sent(codec, []).shape == (0,)


def test_clipped_before_it_is_measured() -> None:
    x = np.array([300.0, -400.0])
    np.testing.assert_allclose(
        sent(local_clip(dither(bits=8), 1.0), x), [0.6, -0.8], atol=0.8 / 127
    )
    # What is kept back is of the clipped update too.
    codec, given = local_clip(error_feedback(top_k(k=1)), 1.0), jnp.asarray(x, jnp.float32)
    _, memory = send(codec, codec.init(given), given)
    target = codec.diagnose(context_of(codec, given), given, memory).target
    np.testing.assert_allclose(target, [0.6, -0.8], rtol=1e-6)
    np.testing.assert_allclose(memory.own.kept, [0.6, 0], rtol=1e-6)
