"""What is no weight is an error; the law of weights is in `jaxcomm.testing`."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from tests.cases import CASES, WEIGHTED, Case
from tests.workers import aggregate, gradients, initial, one_leaf


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, 2.0**-101, 2.0**101])
@pytest.mark.parametrize("case", WEIGHTED, ids=repr)
def test_invalid_static_weights_are_refused(case: Case, weight: float) -> None:
    tx, updates = case.make(), one_leaf()
    state = initial(tx, updates, "vmap")
    update = jax.vmap(lambda g: tx.update(g, state, weight=weight)[0], axis_name="data")
    with pytest.raises(ValueError, match=r"`weight` must be 0 or from .* got"):
        jax.eval_shape(update, updates)


def test_weighted_means_of_float64_stay_float64() -> None:
    with jax.enable_x64(True):
        given, weights = jnp.array([1.0, 2.0], jnp.float64), jnp.array([1.0, 2.0], jnp.float32)
        average = lambda g, w: jaxcomm.mean().update(g, optax.EmptyState(), weight=w)[0]  # noqa: E731
        result = jax.vmap(average, axis_name="data")(given, weights)
    np.testing.assert_allclose(result, 5 / 3, rtol=1e-15)


@pytest.mark.parametrize("case", [c for c in CASES if not c.weighted], ids=repr)
def test_methods_without_weights_refuse_them(case: Case) -> None:
    with pytest.raises(ValueError, match="`weight`"):
        aggregate(case.make(), gradients(3), weights=[1.0, 1.0, 1.0])
