"""Momentum against its formula, where the codec shows its scale, as signs do not."""

import jax.numpy as jnp
import numpy as np

from jaxcomm import Context
from jaxcomm.compression.feedback import momentum
from jaxcomm.compression.sparsifiers import top_k


def test_a_worker_sends_its_exponential_average() -> None:
    codec, given = momentum(top_k(ratio=1.0), momentum=0.75), np.random.default_rng(0)
    average, memory = np.zeros(5), codec.init(jnp.zeros(5))
    for x in given.standard_normal((4, 5)).astype(np.float32):
        context = Context.of(jnp.asarray(x), memory=memory)
        payload, memory = codec.encode(context, jnp.asarray(x))
        average = 0.75 * average + 0.25 * x
        np.testing.assert_allclose(codec.decode(context, payload), average, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(memory.own.kept, average, rtol=1e-5, atol=1e-7)
