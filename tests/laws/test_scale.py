"""A small layer beside a large one moves in proportion, unless the row says why not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import CASES, Case
from tests.workers import aggregator, initial

WORKERS, SIZE, STEPS, WARM, SMALL = 3, 256, 24, 12, 1e-4
BIASED = [case for case in CASES if not case.unbiased]


def ratio(case: Case) -> float:
    """The norm of the small layer's updates relative to its mean gradients."""
    normal = np.random.default_rng(11).normal(size=(STEPS, 2, WORKERS, SIZE))
    small, large = (jnp.asarray(x, jnp.float32) for x in (SMALL * normal[:, 0], normal[:, 1]))
    tx, ones = case.make(), jnp.ones(WORKERS)
    run = aggregator(tx, WORKERS, "vmap")
    first = {"large": large[0], "small": small[0]}

    @jax.jit
    def train(state: Any) -> jax.Array:
        def step(state: Any, given: Any) -> Any:
            results, state = run(given, state, ones)
            return state, jnp.sum(jnp.square(results["small"][0]))

        return jax.lax.scan(step, state, {"large": large, "small": small})[1]

    moved = np.asarray(train(initial(tx, first, "vmap")))[WARM:].mean()
    given = (np.asarray(small, np.float64).mean(axis=1) ** 2).sum(axis=1)[WARM:].mean()
    return float((moved / given) ** 0.5)


@pytest.mark.parametrize("case", [c for c in BIASED if not c.alien], ids=repr)
def test_a_small_layer_moves_at_its_own_rate(case: Case) -> None:
    assert 0.2 < ratio(case) < 5


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow) for c in BIASED if c.alien], ids=repr
)
def test_the_other_methods_have_a_reason(case: Case) -> None:
    assert not 0.2 < ratio(case) < 5
