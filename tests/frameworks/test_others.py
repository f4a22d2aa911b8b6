"""Models of equinox and haiku: parameters without what is no array, and model state."""

from typing import Any

import chex
import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.frameworks.test_flax import METHODS, X, errors_of, trained
from tests.training.places import SGD, at, begun


@pytest.mark.parametrize("where", ["auto 4", "simulated 4"])
def test_batch_norm_of_equinox_reduces_over_an_axis_of_vmap(where: str) -> None:
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(6, "batch", mode="batch")
    params, rest = eqx.partition(norm, eqx.is_inexact_array)

    def loss_fn(params: Any, state: Any, x: jax.Array) -> Any:
        norm = jax.vmap(eqx.combine(params, rest), (0, None), (0, None), axis_name="batch")
        out, state = norm(x, state)
        return jnp.mean((out - x) ** 2), state

    step, opt_state = begun(loss_fn, SGD, at(where), params, has_model_state=True)
    new, after, _, _ = step(params, state, opt_state, X)
    gradient = jax.grad(loss_fn, has_aux=True)
    each = [gradient(params, state, rows) for rows in np.split(X, 4)]
    mean, means = jax.tree.map(lambda *x: sum(map(np.float64, x)) / 4, *each)
    expected = jax.tree.map(lambda x, g: x - 0.1 * g, params, mean)
    chex.assert_trees_all_close((new, after), (expected, means), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_haiku() -> None:
    def forward(x: jax.Array) -> jax.Array:
        hidden = hk.BatchNorm(True, True, decay_rate=0.9)(hk.Linear(8)(x), is_training=True)
        return hk.Linear(1)(jax.nn.relu(hidden))

    model = hk.transform_with_state(forward)
    params, state = model.init(jax.random.key(0), X)

    def loss_fn(params: Any, state: Any, batch: Any, key: jax.Array) -> Any:
        prediction, state = model.apply(params, state, key, batch[0])
        return errors_of(prediction, batch[1]), state

    with jax.numpy_dtype_promotion("standard"):  # Haiku's moving average multiplies dtypes.
        losses, _, _ = trained(loss_fn, METHODS["global_qsgd"](0.05), params, state, keys=True)
    assert losses[-1] < 0.3 * losses[0]
