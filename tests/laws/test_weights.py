"""`update(..., weight=w)` is the weighted mean."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from tests.cases import CASES, FEW, WEIGHTED, Case, rows
from tests.workers import MODE_ROWS, Mode, aggregate, aggregator, flat, gradients, initial, one_leaf

WEIGHTS = {
    "uneven": [1.0, 2.0, 5.0, 0.5],
    "some_zero": [0.0, 3.0, 0.0, 1.0],
    "one_left": [0.0, 0.0, 2.0, 0.0],
    "equal": [7.0, 7.0, 7.0, 7.0],
}


def check_weights(case: Case, weights: list[float], mode: Mode) -> None:
    updates = gradients(4)
    given, shares = flat(updates), np.array(weights)[:, None] / np.sum(weights)
    results = flat(aggregate(case.make(), updates, mode, weights))
    scaled = np.abs(4 * shares * given).max()
    bound = (case.resolution(*given.shape) + 1e-6) * scaled
    assert np.abs(results - np.sum(shares * given, axis=0)).max() <= bound


@pytest.mark.quick(4)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("case", rows(WEIGHTED), ids=repr)
def test_weights(case: Case, weights: str) -> None:
    check_weights(case, WEIGHTS[weights], "vmap")


@pytest.mark.parametrize("mode", MODE_ROWS[:2])
@pytest.mark.parametrize("case", rows(WEIGHTED, FEW), ids=repr)
def test_weights_on_a_mesh(case: Case, mode: Mode) -> None:
    check_weights(case, WEIGHTS["some_zero"], mode)


@pytest.mark.parametrize("case", rows(WEIGHTED), ids=repr)
def test_no_weight_at_all(case: Case) -> None:
    assert np.all(flat(aggregate(case.make(), gradients(4), "checked", [0.0] * 4)) == 0)


@pytest.mark.parametrize("case", rows(WEIGHTED), ids=repr)
def test_a_worker_without_weight_does_not_count(case: Case) -> None:
    updates = {"bias": np.ones((4, 3)), "kernel": np.ones((4, 5, 2)), "scale": np.ones(4)}
    updates["bias"][1], updates["kernel"][1] = np.nan, np.inf
    updates = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), updates)
    result = flat(aggregate(case.make(), updates, weights=[1.0, 0.0, 1.0, 1.0]))
    bound = 4 / 3 * case.resolution(*result.shape) + 1e-6
    np.testing.assert_allclose(result, 1.0, atol=bound)


@pytest.mark.parametrize("case", rows(WEIGHTED), ids=repr)
def test_a_weight_that_is_none_makes_the_mean_nan_for_all(case: Case) -> None:
    # Combined with weights that leave the sum unchanged: 1, 0 and the largest float.
    for wrong in ([-1.0, 1.0, 0.0, 2.0], [-1.0, 1.0, 0.0, 0.0], [np.nan, 0.0, 0.0, 0.0]):
        assert np.all(np.isnan(flat(aggregate(case.make(), gradients(4), "checked", wrong))))
    # And with weights whose quotient would be 0, or NaN.
    for huge in ([np.inf, 1.0, 0.0, 2.0], [3e38] * 4, [3e37] * 4, [1e-39, 0.0, 0.0, 0.0]):
        assert np.all(np.isnan(flat(aggregate(case.make(), gradients(4), "checked", huge))))


@pytest.mark.parametrize("case", rows(WEIGHTED, {"mean", "global_qsgd"}), ids=repr)
def test_weights_at_both_ends_of_their_range(case: Case) -> None:
    for scale in (2.0**-100, 2.0**98):
        check_weights(case, [scale, 4 * scale, 0.0, scale], "checked")


@pytest.mark.parametrize("weight", [2.0**-101, 2.0**101])
def test_a_weight_that_is_known_to_be_out_of_range_is_an_error(weight: float) -> None:
    tx, updates = jaxcomm.mean(), one_leaf()
    update = jax.vmap(lambda g: tx.update(g, tx.init(g), weight=weight)[0], axis_name="data")
    with pytest.raises(ValueError, match=r"`weight` must be 0 or from 2\*\*-100 to 2\*\*100"):
        jax.eval_shape(update, updates)


@pytest.mark.parametrize("weight", [-1, -0.5, math.nan, math.inf])
@pytest.mark.parametrize("case", rows(WEIGHTED, {"mean", "global_qsgd"}), ids=repr)
def test_a_weight_that_is_known_to_be_none_is_an_error(case: Case, weight: float) -> None:
    tx, updates = case.make(), one_leaf()
    state = initial(tx, updates, "vmap")
    update = jax.vmap(lambda g: tx.update(g, state, weight=weight)[0], axis_name="data")
    with pytest.raises(ValueError, match=f"`weight` must be 0 or from .* got {weight}"):
        jax.eval_shape(update, updates)


@pytest.mark.parametrize("case", rows(WEIGHTED), ids=repr)
def test_equal_weights_change_nothing(case: Case) -> None:
    updates = gradients(4)
    plain = flat(aggregate(case.make(), updates))
    weighted = flat(aggregate(case.make(), updates, weights=[2.0] * 4))
    np.testing.assert_array_equal(plain, weighted)


@pytest.mark.quick(4)
@pytest.mark.parametrize("case", rows(WEIGHTED), ids=repr)
def test_a_constant_factor_changes_nothing(case: Case) -> None:
    """Neither updates nor state, over several steps."""
    tx, updates = case.make(), gradients(4)
    found = []
    for factor in (1.0, 64.0):
        run, state = aggregator(tx, 4, "vmap", weighted=True), initial(tx, updates, "vmap")
        for step in range(3):
            weights = factor * np.roll(np.array(WEIGHTS["uneven"], np.float32), step)
            result, state = run(updates, state, weights)
            found.append(flat(result))
    np.testing.assert_array_equal(found[:3], found[3:])


def test_a_weighted_mean_of_float64_is_one() -> None:
    with jax.enable_x64(True):
        given, weights = jnp.array([1.0, 2.0], jnp.float64), jnp.array([1.0, 2.0], jnp.float32)
        average = lambda g, w: jaxcomm.mean().update(g, optax.EmptyState(), weight=w)[0]  # noqa: E731
        result = jax.vmap(average, axis_name="data")(given, weights)
    np.testing.assert_allclose(result, 5 / 3, rtol=1e-15)


@pytest.mark.parametrize("case", rows([c for c in CASES if not c.weighted]), ids=repr)
def test_what_cannot_be_weighted_refuses_weights(case: Case) -> None:
    with pytest.raises(ValueError, match="`weight`"):
        aggregate(case.make(), gradients(3), weights=[1.0, 1.0, 1.0])
