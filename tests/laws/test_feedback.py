"""Feedback loses nothing: the sent and the kept arrays add up to the input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm import Keys
from tests.cases import CASES, Case
from tests.codecs import context_of
from tests.slow import slow

STEPS = 6


def check_feedback(case: Case, shape: tuple[int, ...]) -> None:
    codec, rng = case.codec, np.random.default_rng(8)
    given = rng.standard_t(3, size=(STEPS, *shape)).astype(np.float32)

    @jax.jit
    def step(key: jax.Array, memory: object, x: jax.Array) -> tuple[jax.Array, object]:
        context = context_of(codec, x, Keys(*jax.random.split(key)), memory)
        payload, memory = codec.encode(context, x)
        return codec.decode(context.received(), payload), memory

    memory, sent = codec.init(jnp.asarray(given[0])), np.zeros(shape)
    for number, x in enumerate(given):
        one, memory = step(jax.random.key(number), memory, jnp.asarray(x))
        sent = case.discount * sent + np.asarray(one, np.float64)
        kept = np.asarray(memory.own.kept, np.float64)
        weights = case.discount ** np.arange(number + 1)[::-1]
        total = np.tensordot(weights, given[: number + 1].astype(np.float64), 1)
        np.testing.assert_allclose(sent + kept, total, rtol=0, atol=2e-6 * np.abs(given).max())
    assert np.any(sent != 0)


@pytest.mark.parametrize("shape", [(5, 8), slow((40,)), slow(())], ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if c.feedback], ids=repr)
def test_feedback(case: Case, shape: tuple[int, ...]) -> None:
    check_feedback(case, shape)
